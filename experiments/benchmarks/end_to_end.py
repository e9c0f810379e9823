"""Where the time of one RL step goes: a step of a config against its sampler and its updates alone, on the same tokens.

    python -m experiments.benchmarks.end_to_end [--config=configs/quickstart.py --rounds=5 --json=FILE] [--config.section.key=value ...]

Each round takes a step (`cispo_jax.trainer.rollout_step`) and then does its sampling, its old log-probs and its updates again by
themselves, from the same weights. Printed are medians over the rounds, and medians of the rounds' ratios:

  step          the whole step: prompts, sampling, scoring, packing, old log-probs, updates, metrics, the rollouts on disk
  sample        its sampling alone; old: its old log-probs alone; updates: its updates alone
  step / parts  the step over the sum of the three

Then seconds by phase as the run itself reports them (`time/*` in metrics.jsonl), and programs compiled after the second step.

`--config=configs/quickstart.py --rounds=3` on 2 cores of an AMD EPYC (jax 0.10.2): a step takes 8.7 s; sampling 2.2, old log-probs 0.9,
updates 6.2; step / parts 0.93; nothing compiled after the second step.
"""

import functools
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from etils import epath

from experiments import cli
from experiments.benchmarks import timing

PARTS = ("step", "sample", "old", "updates")


class Recorded:
    """A function that keeps the arguments of its calls but the first, the model or the state."""

    def __init__(self, function):
        self.function, self.calls = function, []

    def __call__(self, first, *rest, **options):
        self.calls.append((rest, options))
        return self.function(first, *rest, **options)

    def again(self, first):
        """The same calls, one after the other; those that return a state go on with it."""
        result = None
        for rest, options in self.calls:
            result = self.function(first, *rest, **options)
            first = result[0] if isinstance(result, tuple) else first
        return result


def one_step(run, state, step: int, *sinks) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Seconds of the step and of its parts, and the metrics of the step."""
    from cispo_jax import trainer

    recorded = (run.sample, run.score_step, run.train_step)
    for function in recorded:
        function.calls.clear()
    before = jax.tree.map(jnp.array, state.train)
    metrics: dict[str, float] = {}
    seconds = {"step": timing.seconds_of(lambda: metrics.update(trainer.rollout_step(run, state, step, *sinks)))}
    firsts = (lambda: run.to_sampling(before.model), lambda: before.model, lambda: before)
    for name, function, first in zip(PARTS[1:], recorded, firsts, strict=True):
        seconds[name] = timing.seconds_of(functools.partial(_again, function, first))
    return seconds, metrics


def _again(function: Recorded, first: Callable[[], Any]) -> Any:
    result = function.again(first())
    return result.log_probs if hasattr(result, "log_probs") else result


def main(config) -> None:
    from cispo_jax import building, trainer
    from cispo_jax.config import to_dict
    from cispo_jax.training.checkpoint import Checkpoints
    from cispo_jax.training.metrics import Writer

    cli.quiet()
    compiled = timing.Compilations()
    run = building.build(config)
    state = trainer.RunState(run.init_state(run.make_model()))
    for name in ("sample", "score_step", "train_step"):
        setattr(run, name, Recorded(getattr(run, name)))
    rounds = flags.FLAGS.rounds
    found: dict[str, timing.Seconds] = {name: {unit: [] for unit in timing.UNITS} for name in PARTS}
    phases: list[dict[str, float]] = []
    of_two = 0
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(epath.Path(folder), config.logging, {})
        checkpoints = Checkpoints(epath.Path(folder) / "checkpoints", keep=1)
        for step in range(1, rounds + 3):
            seconds, metrics = one_step(run, state, step, writer, checkpoints)
            if step == 2:
                of_two = compiled.count
            if step > 2:
                phases.append(metrics)
                for name, values in seconds.items():
                    for unit in timing.UNITS:
                        found[name][unit].append(values[unit])
        for resource in (writer, checkpoints, run.score):
            resource.close()
    of = {name: timing.median(found[name]) for name in PARTS}
    total = {unit: [sum(found[n][unit][i] for n in PARTS[1:]) for i in range(rounds)] for unit in timing.UNITS}
    ratio = timing.ratio(found["step"], total)
    print(f"{jax.devices()[0].device_kind}; median of {rounds} steps")
    for name in PARTS:
        print(f"  {name:<10}{of[name]['wall']:9.3f} s{of[name]['cpu']:9.3f} CPU s")
    print(f"step / parts: {ratio['wall']:.2f} wall, {ratio['cpu']:.2f} CPU")
    names = [name for name in phases[0] if name.startswith("time/")]
    by_phase = {name: statistics.median(metrics[name] for metrics in phases) for name in names}
    print("  ".join(f"{name} {seconds:.3f} s" for name, seconds in by_phase.items()))
    print(f"compiled after the second step: {compiled.count - of_two}")
    figures = {"parts": of, "step_times_parts": ratio, "phases": by_phase, "compiled_after": compiled.count - of_two}
    timing.write(flags.FLAGS.json, {"config": to_dict(config), "figures": figures})


if __name__ == "__main__":
    cli.define_flags(workdir=False)
    flags.DEFINE_integer("rounds", 5, "steps to measure, after two")
    flags.DEFINE_string("json", "", "file for the figures")
    cli.run(main)
