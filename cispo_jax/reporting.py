"""What a person sees of a run: lines on the terminal, the numbers of a step, the table at the end."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import resource
import sys
import time
from typing import Any

import jax
import numpy as np
from etils import epath

from cispo_jax import distributed, evaluation, masked, storage
from cispo_jax.config import Config, ConfigError
from cispo_jax.routing import RouterSums, router_metrics

# Metrics that are also written for each update of the batch, as NAME/u00, NAME/u01, ...
PER_UPDATE = ("clip/dropped_ppo", "clip/dropped_dapo", "clip/at_cap", "policy/ratio_mean", "grad/norm")


UPDATE_METRICS = (
    "loss", "grad/norm", "policy/entropy", "policy/ratio_mean", "policy/ratio_max",
    "clip/dropped_ppo", "clip/dropped_dapo", "clip/at_cap", "optimizer/learning_rate",
)  # fmt: skip


@distributed.main_only
def say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def timed_line(text: str):
    start = time.monotonic()
    yield
    say(f"{text} ({time.monotonic() - start:.1f} s)")


class StepReport:
    """Collects the numbers of one rollout step; device values are read once, at the end."""

    def __init__(self, step: int, config: Config):
        self._step, self._config = step, config
        self._start = time.monotonic()
        self._values: dict[str, Any] = {}
        self._times: dict[str, float] = {"sample": 0.0, "score": 0.0, "train": 0.0}
        self._updates: dict[int, dict[str, Any]] = {}

    @contextlib.contextmanager
    def timed(self, phase: str):
        start = time.monotonic()
        yield
        self._times[phase] += time.monotonic() - start

    def values(self, values: dict[str, Any]) -> None:
        self._values |= values

    def update(self, index: int, metrics: dict[str, Any], rate: float) -> None:
        self._updates[index] = metrics
        self._values["optimizer/learning_rate"] = rate

    def rollouts(self, writer, batches: list[Any], live_P: np.ndarray) -> None:
        """Writes the sampled responses and counts them; every sampled group, admitted or not."""
        records, rewards, lengths, finished = [], [], [], []
        for batch in batches:
            G = batch.rewards.shape[1]
            flat = batch.rewards.reshape(-1)
            for row, text in enumerate(batch.texts):
                example = batch.examples[row // G]
                records.append(
                    {
                        "prompt": example["prompt"],
                        "answer": example.get("answer"),
                        "response": text,
                        "reward": None if np.isnan(flat[row]) else float(flat[row]),
                        "parts": {name: values[row] for name, values in batch.parts.items()},
                        "finish_reason": batch.rollout.finish_reasons[row],
                        "tokens": int(batch.rollout.lengths[row]),
                    }
                )
            rewards.append(flat)
            lengths.append(batch.rollout.lengths)
            finished += batch.rollout.finish_reasons
        writer.rollouts(self._step, records)
        flat, tokens = np.concatenate(rewards), np.concatenate(lengths)
        scored = flat[~np.isnan(flat)]
        parts = {name for batch in batches for name in batch.parts}
        for name in sorted(parts) if len(parts) > 1 else ():
            values = [v for batch in batches for v in batch.parts.get(name, []) if v is not None]
            self._values[f"reward/{name}"] = float(np.mean(values)) if values else np.nan
        self._values |= _by_task(batches)
        self._values |= {
            "reward/mean": float(scored.mean()) if len(scored) else np.nan,
            "reward/std": float(scored.std()) if len(scored) else np.nan,
            "reward/unscored": int(np.isnan(flat).sum()),
            "groups/sampled": sum(len(batch.examples) for batch in batches),
            "groups/trained": int(live_P.sum()),
            "responses": len(flat),
            "tokens/generated": int(tokens.sum()),
            "response/length": float(tokens.mean()),
            "response/length_p99": float(np.percentile(tokens, 99)),
            "response/truncated": float(np.mean([reason == "length" for reason in finished])),
            "response/repetition": float(np.mean([reason == "repetition" for reason in finished])),
        }

    def finish(self) -> dict[str, float]:
        """Reads the device values, pools the updates, prints the progress line."""
        waited = time.monotonic()
        updates, values = jax.device_get((self._updates, self._values))
        pooled: dict[str, Any] = {}
        for index, metrics in updates.items():
            pooled = masked.add_sums(pooled, metrics["sums"]) if pooled else metrics["sums"]
            means = masked.means(metrics["sums"]) | {"grad/norm": metrics["grad/norm"]}
            values |= {f"{name}/u{index:02d}": means[name] for name in PER_UPDATE}
        # A step without an update has no such numbers: they are written as null, not as 0.
        values = dict.fromkeys(UPDATE_METRICS, np.nan) | values | masked.means(pooled)
        values["updates"] = len(updates)
        routers = [metrics["router"] for metrics in updates.values() if metrics["router"] is not None]
        if routers:
            values |= router_metrics(functools.reduce(RouterSums.plus, routers))
        for name in ("loss", "grad/norm") if updates else ():
            values[name] = np.mean([metrics[name] for metrics in updates.values()])
        self._times["train"] += time.monotonic() - waited  # the updates were only enqueued until here
        elapsed = time.monotonic() - self._start
        values |= {f"time/{phase}": seconds for phase, seconds in self._times.items()} | {"time/step": elapsed}
        values["tokens/per_second_sampled"] = values["tokens/generated"] / max(self._times["sample"], 1e-9)
        values |= peak_memory()
        result = {name: float(value) for name, value in values.items()}
        left = (self._config.num_steps - self._step) * elapsed
        policy = "no group to learn from"
        if updates:
            policy = f"entropy {result['policy/entropy']:.2f}  PPO would drop {result['clip/dropped_ppo']:.1%}"
        say(
            f"step {self._step}/{self._config.num_steps}  reward {result['reward/mean']:.3f}  length {result['response/length']:.1f}  "
            f"groups {int(result['groups/trained'])}/{int(result['groups/sampled'])}  {policy}  {elapsed:.1f} s  "
            f"about {left / 60:.1f} min left"
        )
        return result


class WarmStartReport:
    """A progress line for about every tenth of the supervised updates."""

    def __init__(self, num_steps: int):
        self._num_steps, self._start = num_steps, time.monotonic()

    def __call__(self, update: int, loss: float) -> None:
        if update == self._num_steps or update % max(1, self._num_steps // 10) == 0:
            elapsed = time.monotonic() - self._start
            left = elapsed / update * (self._num_steps - update)
            say(
                f"warm start {update}/{self._num_steps}  loss {loss:.4f}  {elapsed:.0f} s  about {left / 60:.1f} min left"
            )


class Trace:
    """A `jax.profiler` trace of the main process in the rollout steps `steps`, in WORKDIR/profile; a context around the loop."""

    def __init__(self, steps: range, directory: epath.Path):
        self._steps, self._running = steps if distributed.is_main() else range(0), False
        self._directory, self._files = directory, storage.LocalFolder(directory)

    def step(self, step: int) -> None:
        """Call before each step."""
        if (step in self._steps) != self._running:
            self._stop() if self._running else jax.profiler.start_trace(str(self._files.path))
            self._running = step in self._steps

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self._files.put()
        say(f"profile written to {self._directory} (xprof or tensorboard --logdir)")

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        if self._running:
            self._stop()


def _by_task(batches: list[Any]) -> dict[str, float]:
    """Mean reward and length of each task of a mixture."""
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for batch in batches:
        lengths = batch.rollout.lengths.reshape(batch.rewards.shape)
        for example, rewards, tokens in zip(batch.examples, batch.rewards, lengths, strict=True):
            if "task" in example:
                found.setdefault(example["task"], []).append((rewards, tokens))
    values: dict[str, float] = {}
    for task, groups in found.items():
        rewards, tokens = (np.concatenate(parts) for parts in zip(*groups, strict=True))
        known = rewards[~np.isnan(rewards)]
        values[f"reward/mean/{task}"] = float(known.mean()) if len(known) else np.nan
        values[f"response/length/{task}"] = float(tokens.mean())
    return values


def peak_memory() -> dict[str, float]:
    """Peak memory in GiB: of this process, and of the first device where it keeps count."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"memory/peak_host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        peak["memory/peak_device_gib"] = stats["peak_bytes_in_use"] / 2**30
    return peak


def evaluate_and_record(run, state, workdir: epath.Path, name: str = "") -> dict[str, float]:
    """Evaluates the current weights on every benchmark; records go to evaluations/step_000123.jsonl (or NAME.jsonl), of a further
    benchmark to evaluations/step_000123.BENCHMARK.jsonl."""
    sampler = run.to_sampling(state.train.model)
    smallest = min(jax.tree.leaves(state.train.model), key=lambda leaf: leaf.size)  # every update moves it
    weights = hashlib.sha256(distributed.to_host(smallest).tobytes()).hexdigest()
    values: dict[str, float] = {}
    for benchmark in run.benchmarks:
        settings = benchmark.settings
        count = min(settings.num_problems or len(benchmark.examples), len(benchmark.examples))
        sampled = f" and {settings.samples} sampled ones" if settings.samples else ""
        what = benchmark.name or "held-out problems"
        say(f"evaluating on {count} {what}: a greedy response{sampled} to each ...")
        stem = f"{name or f'step_{state.step:06d}'}{benchmark.name and '.'}{benchmark.name}"
        path = workdir / "evaluations" / f"{stem}.jsonl"
        partial = path.with_name(f"{stem}.partial.jsonl")
        metrics, records = evaluation.evaluate(
            sampler,
            benchmark,
            sample=run.sample,
            encode=run.encode,
            decode=run.tokenizer.decode,
            score=run.score,
            seed=run.config.seed + 2**31,  # apart from the keys of training
            step=state.step,
            partial=partial,
            weights=weights,
        )
        evaluation.write_records(path, records, partial)
        values |= metrics
        say(_summary(benchmark.name, state.step, metrics, len(records)))
    return values


def _summary(benchmark: str, step: int, metrics: dict[str, float], count: int) -> str:
    prefix = f"eval/{benchmark}/" if benchmark else "eval/"
    of = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    at_k = {name: value for name, value in of.items() if "@" in name and "_" not in name and "/" not in name}
    largest = max((int(name.rpartition("@")[2]) for name in at_k), default=0)
    shown = "".join(f"  {name} {value:.1%}" for name, value in at_k.items() if name.endswith(f"@{largest}"))
    tasks = [name.removeprefix("accuracy/") for name in of if name.startswith("accuracy/")]
    by_task = "".join(
        f"\n  {task:<20}{of[f'accuracy/{task}']:.1%}"
        + "".join(f"  avg@{largest} {of[name]:.1%}" for name in (f"avg@{largest}/{task}",) if name in of)
        for task in tasks
    )
    return (
        f"{benchmark or 'held-out'} after step {step}: greedy accuracy {of['accuracy']:.1%} (95 % interval "
        f"{of['accuracy_low']:.1%} to {of['accuracy_high']:.1%}, {count} problems){shown}  "
        f"{next(v for k, v in metrics.items() if k.startswith('time/')):.1f} s{by_task}"
    )


@distributed.main_only
def compare_config(workdir: epath.Path, config: dict[str, Any]) -> None:
    """Says which settings differ from those in the directory's config.json."""
    path = workdir / "config.json"
    if not path.exists():
        return
    try:
        before = _flatten(json.loads(path.read_text()))
    except (ValueError, AttributeError):
        return say(f"warning: {path} cannot be read as settings; it will be written again")
    after = _flatten(json.loads(json.dumps(config)))
    changed = [k for k in sorted(before | after) if before.get(k) != after.get(k)]
    if changed:
        listed = ", ".join(f"{k}: {before.get(k)} -> {after.get(k)}" for k in changed)
        say(f"warning: these settings differ from the run in this directory: {listed}")


@distributed.main_only
def write_config(workdir: epath.Path, config: dict[str, Any]) -> None:
    storage.write_text(workdir / "config.json", json.dumps(config, indent=2) + "\n")


def refuse_a_used_directory(workdir: epath.PathLike) -> None:
    path = storage.absolute(workdir)
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(
            f"--noresume: {workdir} is not empty. Give an empty directory, or leave the flag out to go on with this run."
        )
    distributed.barrier("looked into the directory")  # before another process writes there


def make_workdir(workdir: epath.PathLike) -> epath.Path:
    """The run's directory, made if it is not there; absolute if it is local."""
    try:
        path = storage.absolute(workdir)
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ImportError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"--workdir={workdir} cannot be made: {error}. Give a directory that you may write to."
        ) from None
    return path


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


@distributed.main_only
def say_final_words(workdir: epath.Path, num_steps: int) -> None:
    """Before and after, and where to look."""
    before, after = (workdir / "evaluations" / f"step_{step:06d}.jsonl" for step in (0, num_steps))
    table = evaluation.compare(before, after) + "\n" if before.exists() and after.exists() else ""
    files = {
        f"rollouts/step_{num_steps:06d}.jsonl": "every sampled response of the last step with its reward",
        f"evaluations/step_{num_steps:06d}.jsonl": "every held-out problem with the greedy response",
        "metrics.jsonl": "one line a step; clip/dropped_* = tokens PPO and DAPO would have dropped, CISPO kept",
        "tensorboard": f"tensorboard --logdir {workdir}/tensorboard",
    }
    lines = [f"  {name:<32}{what}" for name, what in files.items() if (workdir / name).exists()]
    say("\n".join([f"\n{table}", f"Run directory: {workdir}", *lines]))
