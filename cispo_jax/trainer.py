"""CISPO's training loop, which reads as the algorithm. One rollout step is:

  1. next prompts      the stream is a pure function of (seed, position) and of its own small state
  2. sample groups     G responses of each prompt, with the log-prob of every token
  3. score             verifiable rewards; a response that cannot be scored carries no signal
  4. admit             dynamic sampling: groups whose rewards are all equal are replaced (bounded) or masked
  5. advantages        relative to the group, over complete groups
  6. old log-probs     the denominator of the ratio, frozen once for the batch
  7. updates           num_epochs x num_minibatches optimizer steps on the same batch
  8. after step        evaluate, log, save

`train` resumes by itself: a run directory with a checkpoint goes on after it, with the same numbers as if it had never stopped.
Several processes each run this loop on the same host state; what they share out and who writes lies behind functions (`distributed.py`).
"""

from __future__ import annotations

from cispo_jax import _requires_train  # noqa: F401

# isort: split
import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from cispo_jax import diagnostics, distributed
from cispo_jax.config import Config, from_config_dict, profile_steps, to_dict
from cispo_jax.reporting import (
    StepReport,
    Trace,
    WarmStartReport,
    compare_config,
    evaluate_and_record,
    make_workdir,
    refuse_a_used_directory,
    say,
    say_final_words,
    timed_line,
    write_config,
)
from cispo_jax.training.checkpoint import Checkpoints
from cispo_jax.training.groups import Scored, admit, assemble, compute_advantages, minibatches, trained_tokens
from cispo_jax.training.metrics import Writer, discard_after
from cispo_jax.training.optimizer import learning_rate
from cispo_jax.types import Batch, Rollout, TrainState


@dataclasses.dataclass
class RunState:
    """All that a checkpoint holds: what the optimizer moves, and what the host counts."""

    train: TrainState
    step: int = 0  # rollout steps done
    prompts: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"position": 0}
    )  # the stream's own (`data.stream`)


def train(
    config: Config | Mapping[str, Any],
    workdir: epath.PathLike,
    *,
    dataset: Any = None,
    reward: Callable | None = None,
    objective: Callable | None = None,
    model: Any = None,
    sample_fn: Callable | None = None,
    resume: bool = True,
) -> dict[str, float]:
    """Trains and returns the metrics of the last step.

    Args:
      config: a page's `ConfigDict` or a `Config`.
      workdir: directory of the run: config.json, metrics.jsonl, rollouts/, evaluations/, checkpoints/, tensorboard/.
      dataset: examples (dicts with `prompt` and `answer`) in place of `config.data.source`.
      reward: reward function in place of `config.rewards` (signature: `cispo_jax.rewards`).
      objective: loss in place of `config.objective.name` (signature: `cispo_jax.cispo_loss`).
      model: a `Transformer` to start from in place of `config.model.weights`; its buffers are donated.
      sample_fn: sampler in place of ours: (model, prompts, *, group_size, temperature, seed, step, prompt_ids, ...) -> Rollout.
      resume: False refuses a directory that holds a run.

    Raises:
      ConfigError: settings or inputs that cannot work, before anything is compiled.
      SystemExit: with code 75, when SIGTERM has ended the run after a step and its checkpoint; the same call goes on.
    """
    from cispo_jax import building  # the packages of the layers below; the loop itself only sees functions

    config = from_config_dict(config)
    if not resume:
        refuse_a_used_directory(workdir)
    run = building.build(config, dataset=dataset, reward=reward, objective=objective, model=model, sample_fn=sample_fn)
    run.reference = run.make_reference()
    for note in run.notes:
        say(note)
    workdir = make_workdir(workdir)
    compare_config(workdir, to_dict(config))
    checkpoints = Checkpoints(workdir / "checkpoints", keep=config.checkpoint.keep)
    state = start_or_resume(run, checkpoints, workdir)
    # Not before: settings that the checkpoint does not fit must not replace its own.
    write_config(workdir, to_dict(config))
    writer = Writer(workdir, config.logging, to_dict(config))
    metrics: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        for resource in (run.score, writer, checkpoints):
            stack.callback(resource.close)
        trace = stack.enter_context(Trace(profile_steps(config.profile), workdir / "profile"))
        stop = stack.enter_context(distributed.stop_requests())
        if state.step == 0:
            metrics = evaluate_and_record(run, state, workdir)
            writer.metrics(0, metrics)
        for step in range(state.step + 1, config.num_steps + 1):
            trace.step(step)
            metrics = rollout_step(run, state, step, writer, checkpoints)
            # ---- 8. after step
            last = step == config.num_steps
            if last or (config.evaluation.every and step % config.evaluation.every == 0):
                metrics |= evaluate_and_record(run, state, workdir)
            writer.metrics(step, metrics)
            stopping = stop(step)
            if last or stopping or step % config.checkpoint.every == 0:
                checkpoints.save(step, state.train, state.prompts)
            if stopping and not last:
                stop_early(step, checkpoints)
    say_final_words(workdir, config.num_steps)
    return metrics


def rollout_step(run, state: RunState, step: int, writer: Writer, checkpoints: Checkpoints) -> dict[str, float]:
    """Steps 1 to 7; moves `state` and returns the metrics."""
    config = run.config
    report = StepReport(step, config)
    sampler, limit = run.to_sampling(state.train.model), config.sampling.limit(step)
    batches: list[Scored] = []
    admitted: list[np.ndarray] = []
    for _ in range(1 + config.sampling.max_refills):
        # ---- 1. next prompts
        examples, ids = run.stream.take(state.prompts, config.sampling.prompts_per_step)
        # ---- 2. sample groups
        with report.timed("sample"):
            rollout = run.sample(
                sampler, [run.encode(e) for e in examples], group_size=config.sampling.group_size,
                temperature=config.sampling.temperature, seed=config.seed, step=step, prompt_ids=ids,
                record_experts=config.objective.routing_replay, on_sync=run.watch(examples), limit=limit,
            )  # fmt: skip
        # ---- 3. score
        with report.timed("score"):
            batches.append(score(run, rollout, examples, step, limit))
            run.stream.observe(state.prompts, examples, batches[-1].pass_rates())
        # ---- 4. admit
        admitted.append(admit(batches[-1], dynamic=config.sampling.dynamic))
        if sum(kept.sum() for kept in admitted) >= config.sampling.prompts_per_step:
            break
    del sampler
    rollout, rewards_PG, live_P = assemble(batches, admitted, config)
    report.rollouts(writer, batches, live_P)
    report.values(run.stream.metrics(state.prompts))
    # ---- 5. advantages
    advantages_PG = compute_advantages(config, rewards_PG, live_P)
    loss_mask = trained_tokens(config, rollout, rewards_PG, live_P)

    with report.timed("train"):
        # ---- 6. old log-probs
        group_ids = np.repeat(np.arange(len(advantages_PG), dtype=np.int32), config.sampling.group_size)
        batch = Batch(
            tokens=np.concatenate([rollout.prompt_tokens, rollout.response_tokens], axis=1),
            padding_mask=np.concatenate([rollout.prompt_mask, rollout.response_mask], axis=1),
            loss_mask=loss_mask,
            coefficients=np.zeros(loss_mask.shape, np.float32),
            advantages=advantages_PG.reshape(-1),
            rollout_log_probs=rollout.log_probs,
            old_log_probs=rollout.log_probs.copy(),
            expert_ids=rollout.expert_ids,
            ref_log_probs=None if run.reference is None else np.zeros(loss_mask.shape, np.float32),
        )
        policies = {"old_log_probs": state.train.model} | ({"ref_log_probs": run.reference} if run.reference else {})
        scored = []
        for rows in minibatches(config, step, num_epochs=1):
            batch.coefficients[rows] = run.coefficients(loss_mask[rows], group_ids[rows])
            if loss_mask[rows].any():
                minibatch, places = run.pack(jax.tree.map(lambda x, rows=rows: x[rows], batch))
                scored += [(rows, places, name, run.score_step(model, minibatch)) for name, model in policies.items()]
        for rows, places, name, log_probs in scored:
            into = getattr(batch, name)
            into[rows] = places.unpack(distributed.to_host(log_probs), into[rows])
        report.values(diagnostics.rollout_mismatch(batch.old_log_probs, rollout.log_probs, loss_mask))
        if config.objective.anchor == "rollout":
            batch = batch._replace(old_log_probs=rollout.log_probs)
        checkpoints.wait()  # a save in flight reads the buffers that the updates donate
        # ---- 7. updates
        planned = config.objective.num_epochs * config.objective.num_minibatches
        for update, rows in enumerate(minibatches(config, step, num_epochs=config.objective.num_epochs)):
            if not loss_mask[rows].any():
                continue  # nothing to learn from: no update, as `train_step` itself would decide
            rate = learning_rate(
                config.optimizer, step=step, update=update, num_steps=config.num_steps, updates_per_step=planned
            )
            minibatch, _ = run.pack(jax.tree.map(lambda x, rows=rows: x[rows], batch))
            state.train, metrics = run.train_step(state.train, minibatch, np.float32(rate))
            report.update(update, metrics, rate)
    state.step = step
    return report.finish()


def start_or_resume(run, checkpoints: Checkpoints, workdir: epath.Path) -> RunState:
    """The state of the newest checkpoint, or that of the starting model, warmed up where the settings ask for it."""
    step = checkpoints.latest()
    # The line of step 0 is written again after a restart at 0: its evaluation is repeated.
    discarded = discard_after(workdir, step or -1)
    if checkpoints.unfinished:
        say(f"warning: unfinished checkpoint(s) passed over: {', '.join(checkpoints.unfinished)}")
    if step is not None:
        train_state, host = checkpoints.restore(step, run.abstract_state, run.shardings)
        gone = f"; {discarded} later line(s) of metrics.jsonl moved to discarded/" if discarded else ""
        say(f"resumed after rollout step {step} of {run.config.num_steps}{gone}")
        if step >= run.config.num_steps:
            say("all steps are done; a higher config.num_steps goes on from here")
        return RunState(train_state, step, host)
    with timed_line("model ready"):
        model = run.make_model()
    if run.config.sft.num_steps:
        model = run.warm_start(model, WarmStartReport(run.config.sft.num_steps))
    state = RunState(run.init_state(model))
    if run.config.sft.num_steps:
        checkpoints.save(0, state.train, state.prompts)
    return state


def stop_early(step: int, checkpoints: Checkpoints) -> None:
    """Ends a run that was asked to stop, once the checkpoint of its last step is complete."""
    checkpoints.wait()
    say(f"stopped by SIGTERM after rollout step {step}, which is saved: the same command goes on from here")
    raise SystemExit(75)


def score(run, rollout: Rollout, examples: list[dict[str, Any]], step: int, limit: int) -> Scored:
    """Rewards of every response, from its decoded text; the sampled ids are what is trained on."""
    P, G = len(examples), run.config.sampling.group_size
    responses = rollout.responses()
    texts = distributed.divide(lambda mine: [run.tokenizer.decode(ids) for ids in responses[mine]], len(responses))
    rows = [example for example in examples for _ in range(G)]
    total, parts = run.score(texts, rows, rollout.finish_reasons, rollout.lengths.tolist(), limit)
    rewards = np.array([np.nan if value is None else value for value in total], np.float64)
    if run.config.sampling.shuffle_rewards:
        rewards = np.random.default_rng((run.config.seed, step)).permutation(rewards)
    return Scored(rollout, examples, texts, rewards.reshape(P, G), parts)
