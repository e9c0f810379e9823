"""From settings to everything a run is made of: tokenizer, problems and rewards here, what its devices compute in `programs.py`.

The loops (`trainer.py`, `evaluation.py`) know none of the packages imported here; they get functions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from cispo_jax import data, distributed, models, rewards, sharding, weights
from cispo_jax.config import Config, ConfigError, changed, suggest, validate
from cispo_jax.data import tokenizers
from cispo_jax.evaluation import Benchmark
from cispo_jax.programs import Programs, describe_updates, make_programs, resolve_objective
from cispo_jax.sampling import slots
from cispo_jax.sampling.watch import Watch
from cispo_jax.training.sft import warm_start


@dataclass
class Run(Programs):
    """Everything a loop calls. Built once; nothing here changes while the run goes on."""

    config: Config
    tokenizer: tokenizers.Tokenizer
    problems: data.Problems
    benchmarks: list[Benchmark]
    stream: data.PromptStream  # the endless, shuffled order of the training problems
    encode: Callable[[dict[str, Any]], list[int]]
    score: rewards.Scorer
    make_model: Callable[[], Any]
    prompt_width: int
    notes: list[str]
    reference: Any = None  # a model: the policy that `objective.kl` holds on to

    def watch(self, examples: list[dict[str, Any]]) -> Watch:
        """What to call while responses to these examples are sampled: groups that are complete are scored meanwhile."""
        mine, begin = distributed.share(len(examples)), self.score.begin
        G, decode, say = (
            self.config.sampling.group_size,
            self.tokenizer.decode,
            distributed.main_only(functools.partial(print, flush=True)),
        )
        return Watch(examples, G, mine=mine, decode=decode, begin=begin, say=say)

    def make_reference(self) -> Any:
        """The starting weights once more, where `objective.kl` holds on to them: the first ones' buffers are donated."""
        return jax.tree.map(jnp.copy, self.make_model()) if self.config.objective.kl else None

    def warm_start(self, model: Any, report: Callable[[int, float], None]) -> Any:
        """Supervised updates on the problems' demonstrations; `report(update, loss)` after each. The model is donated."""
        settings = self.config.sft
        layout = self.layout_of(prompts=settings.batch_size, group_size=1)
        updates = warm_start(
            model,
            _demonstrations(self),
            settings,
            log_probs_fn=self.log_probs_fn,
            prompt_width=self.prompt_width,
            response_width=self.config.sampling.max_new_tokens,
            place=lambda batch: self.pack(batch, layout)[0],
            shardings=self.shardings,
        )
        with jax.set_mesh(self.mesh):
            for update, model, loss in updates:
                report(update, loss)
        return model


def build(
    config: Config,
    *,
    dataset: Any = None,
    reward: Callable | None = None,
    objective: Callable | None = None,
    model: Any = None,
    sample_fn: Callable | None = None,
) -> Run:
    """Puts a run together; every user error is raised here, before anything is compiled. Arguments: see `trainer.train`."""
    notes: list[str] = []
    resolved = resolve_objective(config.objective, objective, notes)
    notes.append(describe_updates(config, resolved[1], custom=objective is not None))
    if config.model.preset not in models.PRESETS and not config.model.weights and model is None:
        raise ConfigError(
            f"config.model.preset={config.model.preset!r}: valid values are {', '.join(models.PRESETS)}."
            + suggest(config.model.preset, models.PRESETS)
        )
    tokenizer = _tokenizer(config)
    with distributed.main_first("data"):
        problems = data.load(config.data) if dataset is None else data.from_examples(dataset, config.data)
    if config.rewards.verifier != "auto":
        scorer = _choice("config.rewards.verifier", config.rewards.verifier, {"auto": None, **rewards.VERIFIERS})
        problems = dataclasses.replace(problems, scorer=scorer, verdict=rewards.verdict_of(scorer))
    notes.append(problems.description)
    prompter = data.Prompter(config.data, tokenizer)
    problems = dataclasses.replace(
        problems, train=prompter.check(problems.train), evaluation=prompter.check(problems.evaluation)
    )
    benchmarks = _benchmarks(config, problems, prompter)
    asked = [problems.train, *(benchmark.examples for benchmark in benchmarks)]
    width = max(len(prompter.encode(example)) for part in asked for example in part)
    score = _scorer(config, problems, reward)
    if config.objective.kl and config.sft.num_steps:
        raise ConfigError(
            f"config.objective.kl={config.objective.kl} with config.sft.num_steps={config.sft.num_steps}: the reference policy is that of "
            "the starting weights, not of the warm start. Export the warm start (experiments.sft, experiments.export) and begin from it."
        )
    if config.sft.num_steps:
        _check_demonstrations(config, problems, tokenizer)

    mesh = sharding.make_mesh(config.mesh)
    architecture = _architecture(config, tokenizer, model)
    if tokenizer.vocab_size > architecture.vocab_size:
        raise ConfigError(
            f"config.model.tokenizer={config.model.tokenizer or config.model.weights!r} has {tokenizer.vocab_size:,} tokens, the "
            f"model only {architecture.vocab_size:,}: they do not belong together."
        )
    if 2 * tokenizer.vocab_size < architecture.vocab_size:
        notes.append(
            f"warning: the tokenizer has {tokenizer.vocab_size:,} tokens, the model {architecture.vocab_size:,}; is "
            f"config.model.tokenizer={config.model.tokenizer!r} the model's own?"
        )
    limit = weights.context_length(config.model.weights) if config.model.weights else None
    if limit is not None and width + config.sampling.max_new_tokens > limit:
        raise ConfigError(
            f"config.sampling.max_new_tokens={config.sampling.max_new_tokens} and prompts of up to {width} tokens are more than the "
            f"{limit} tokens that the model was made for: valid are 1 to {limit - width}."
        )

    programs = make_programs(
        config,
        architecture,
        mesh,
        prompt_width=width,
        max_tokens=limit,
        pad_id=tokenizer.pad_id,
        eos_ids=tokenizer.eos_ids,
        objective=resolved,
        sample_fn=sample_fn,
        memory=distributed.device_memory(),
    )
    if programs.slots and sample_fn is None:
        notes.append(_describe_slots(config, programs, width))

    def make_model():
        if model is not None:
            return jax.tree.map(distributed.from_host, model, programs.shardings.model)
        if config.model.weights:
            return weights.load_pretrained(config.model.weights, mesh=mesh)[0]
        return programs.new_model()

    return Run(
        **vars(programs),
        config=config,
        tokenizer=tokenizer,
        problems=problems,
        benchmarks=benchmarks,
        stream=data.PromptStream(problems.train, config.seed, problems.schedules, config.data.retire_at),
        encode=prompter.encode,
        score=score,
        make_model=make_model,
        prompt_width=width,
        notes=notes,
    )


def _describe_slots(config: Config, programs: Programs, prompt_width: int) -> str:
    rows = slots.row_sizes(programs.slots, sharding.batch_devices(programs.sampling_mesh))
    columns = slots.widths(prompt_width, config.sampling.max_new_tokens)
    return (
        f"{programs.slots:,} of {config.sampling.prompts_per_step * config.sampling.group_size:,} responses decode at a time; compiled for "
        f"{', '.join(f'{n:,}' for n in rows)} rows x {', '.join(f'{n:,}' for n in columns)} columns of cache"
    )


BENCHMARK = ("samples", "temperature", "top_p", "top_k", "num_problems")
ASKING = ("prompt_field", "answer_field", "prompt_suffix", "system_prompt")


def _benchmarks(config: Config, problems: data.Problems, prompter: data.Prompter) -> list[Benchmark]:
    """The held-out problems and `config.evaluation.sets`, whose prompts are checked like those of training."""
    judged_by = lambda scorer: (scorer, rewards.verdict_of(scorer), rewards.answer_of(scorer))
    own = problems.scorer, problems.verdict, rewards.answer_of(problems.scorer)
    benchmarks = [Benchmark("", problems.evaluation, config.evaluation, *own)]
    for name, table in config.evaluation.sets.items():
        where = f"config.evaluation.sets.{name}"
        valid = ("source", "verifier", *BENCHMARK, *ASKING)
        if not isinstance(table, Mapping) or not isinstance(table.get("source"), str):
            raise ConfigError(f"{where}={table!r:.60} must be a table with a source, e.g. aime_2024:FILE.")
        for key in table:
            if key not in valid:
                raise ConfigError(f"{where}.{key} is not one of {', '.join(valid)}.{suggest(key, valid)}")
        asking = {key: table[key] for key in ASKING if key in table}
        path = where.removeprefix("config.")
        examples, scorer = data.load_evaluation(table["source"], changed(config.data, asking, path), where)
        if "verifier" in table:
            scorer = _choice(f"{where}.verifier", table["verifier"], rewards.VERIFIERS)
        sizes = {"num_problems": 0, "sets": {}} | {key: table[key] for key in BENCHMARK if key in table}
        settings = changed(config.evaluation, sizes, path)
        validate(dataclasses.replace(config, evaluation=settings))
        marks = {key: asking[key] for key in ("prompt_suffix", "system_prompt") if key in asking}
        asked = prompter.check([example | marks for example in examples], f"{where}.source")
        benchmarks.append(Benchmark(name, asked, settings, *judged_by(scorer)))
    return benchmarks


def _choice(setting: str, value: str, valid: Mapping[str, Any]) -> Any:
    if value not in valid:
        raise ConfigError(f"{setting}={value!r}: valid values are {', '.join(valid)}.{suggest(value, valid)}")
    return valid[value]


def _tokenizer(config: Config) -> tokenizers.Tokenizer:
    source = config.model.tokenizer or config.model.weights
    if source:
        return weights.load_tokenizer(source)
    raise ConfigError(
        "config.model.tokenizer is empty and config.model.weights brings none: set characters:ABC... (one token a character) or the "
        "path of a tokenizer.json."
    )


def _architecture(config: Config, tokenizer: tokenizers.Tokenizer, model: Any) -> models.TransformerConfig:
    if model is not None:
        return model.config
    if config.model.weights:
        return weights.load_config(config.model.weights)
    return dataclasses.replace(models.PRESETS[config.model.preset], vocab_size=tokenizer.vocab_size)


def _scorer(config: Config, problems: Any, reward: Callable | None) -> rewards.Scorer:
    """The rewards of the settings, or `reward` alone; tried once on a made-up response, so that a typo shows at once."""
    settings = config.rewards
    if reward is not None:
        scorer = rewards.Scorer(
            {getattr(reward, "__name__", "reward"): reward}, workers=settings.workers, divide=distributed.divide
        )
    else:
        scorer = rewards.build(
            settings, problems.scorer, max_new_tokens=config.sampling.max_new_tokens, divide=distributed.divide
        )
    scorer.check(problems.train[0])
    return scorer


def _check_demonstrations(config: Config, problems: data.Problems, tokenizer: tokenizers.Tokenizer) -> None:
    """Every demonstration must exist and fit a response, known before the first update."""
    limit = config.sampling.max_new_tokens
    for example in (problems.train[i] for i in range(len(problems.train))):
        if not example.get("response"):
            raise ConfigError(
                f"config.sft.num_steps={config.sft.num_steps}: the training problem {example['prompt']!r} has no `response` to imitate; "
                f"it has {', '.join(example)}."
            )
        length = len(tokenizer.encode(example["response"])) + 1
        if length > limit:
            raise ConfigError(
                f"config.sampling.max_new_tokens={limit}: the demonstration of {example['prompt']!r} has {length} tokens with its end; "
                f"set it to at least that."
            )


def _demonstrations(run: Run) -> Callable[[int], tuple[Sequence[int], Sequence[int]]]:
    """The i-th demonstration of the stream: prompt ids, response ids with the EOS."""
    end = list(run.tokenizer.eos_ids[:1])

    def pair(index: int):
        example = run.stream[index]
        return run.encode(example), run.tokenizer.encode(example["response"]) + end

    return pair
