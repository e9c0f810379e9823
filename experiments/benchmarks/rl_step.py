"""A whole cycle of RL on a small model: sampling, old log-probs, updates; seconds, memory, and that nothing is compiled twice.

    python -m experiments.benchmarks.rl_step [--layers=8 --vocab=8192 --experts=8 --rounds=5 --json=FILE]

The sizes that several code bases measure: a Qwen3 of 4 layers x 256 (4 / 2 heads of 64, feed-forward 768, vocabulary 512, tied), 4 prompts
x 8 responses, 32 + 64 tokens, 4 updates, float32; `--experts=8` has 8 experts of 256 in place of the feed-forward, 2 a token. A cycle is
`cispo_jax.trainer.rollout_step` itself with a reward that costs nothing. No token ends a response, so that the work is the same in each.

  sampled            tokens a CPU second while sampling
  update             seconds of one of the 4 updates, on one prompt's 8 responses
  bare               the same on padded rows in a dozen lines of JAX (`shapes.Bare`)
  cycle, first       seconds of a cycle; of the first one, with every compilation

On 2 cores of an AMD EPYC (jax 0.10.2), CPU seconds:

                               sampled tokens/s   update   bare   cycle   first cycle (wall)   peak MiB
  default                                 6,050    0.165  0.170    1.03                  8.9        825
  --layers=8 --vocab=8192                 4,030    0.366  0.641    2.30                  9.8        940
  --experts=8                             5,500    0.218  0.176    1.40                 11.6        985
"""

import argparse
import resource
import statistics
import types
from typing import Any

import jax
import numpy as np

from cispo_jax import programs, sharding, trainer
from cispo_jax.config import default_config, from_config_dict
from cispo_jax.data import PromptStream
from experiments import cli
from experiments.benchmarks import shapes, timing

P, G, S, T, UPDATES = 4, 8, 32, 64, 4


def settings(**changes):
    page = default_config()
    page.num_steps, page.mesh.fsdp, page.model.remat = 100, 1, "off"
    page.sampling.prompts_per_step, page.sampling.group_size, page.sampling.max_new_tokens = P, G, T
    page.sampling.dynamic = False
    page.objective.num_minibatches = UPDATES
    page.optimizer.eps = 1e-8
    for name, value in changes.items():
        setattr(page.sampling, name, value)
    return from_config_dict(page)


class Stage:
    """A function that keeps the seconds of its calls."""

    def __init__(self, function):
        self.function, self.seconds = function, []

    def __call__(self, *args, **options):
        result = []
        self.seconds.append(timing.seconds_of(lambda: result.append(self.function(*args, **options)) or result))
        return result[0]

    def total(self, unit: str) -> float:
        return sum(seconds[unit] for seconds in self.seconds)


def make_run(config, architecture):
    """What `rollout_step` asks of a run: our programs, prompts of random tokens, a reward that alternates."""
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    made = programs.make_programs(config, architecture, mesh, prompt_width=S)
    prompts = np.random.default_rng(0).integers(0, architecture.vocab_size, (P, S)).tolist()

    def score(texts, *_):
        rewards = [float(i % 2) for i in range(len(texts))]
        return rewards, {"alternating": rewards}

    run = types.SimpleNamespace(
        **vars(made), reference=None, config=config, score=score, encode=lambda example: prompts[example["id"] % P],
        stream=PromptStream([{"id": i, "prompt": "", "answer": ""} for i in range(P)], 0),
        watch=lambda examples: None, tokenizer=types.SimpleNamespace(decode=lambda ids: ""),
    )  # fmt: skip
    return run, made


class _Nothing:
    """A writer, or checkpoints, that do nothing."""

    def __getattr__(self, name: str):
        return lambda *args, **options: None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="", help="file for the figures")
    args = parser.parse_args(argv)

    compiled = timing.Compilations()
    architecture = shapes.common(args.layers, args.vocab, args.experts)
    run, made = make_run(settings(), architecture)
    state = trainer.RunState(made.init_state(shapes.random_model(architecture)))
    steps = iter(range(1, 10**6))
    writer: Any = _Nothing()
    checkpoints: Any = _Nothing()
    cycle = lambda: trainer.rollout_step(run, state, next(steps), writer, checkpoints)
    first = timing.seconds_of(cycle)
    of_first = compiled.count
    cycles = timing.rounds_of({"cycle": cycle}, args.rounds, warm_up=0)["cycle"]
    recompiled = compiled.count - of_first
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

    # The parts one by one, waiting for each, with the bare step in the same rounds.
    lengths = np.full(G, T)
    full = shapes.minibatch(args.vocab, lengths, group_size=G, prompt=S, response=T)
    bare = shapes.Bare(state.train.model, full)
    stages = {name: Stage(getattr(run, name)) for name in ("sample", "score_step", "train_step")}
    vars(run).update(stages)
    parts: dict[str, timing.Seconds] = {
        name: {unit: [] for unit in timing.UNITS} for name in (*stages, "bare", "cycle")
    }
    for index in range(args.rounds + 1):
        for stage in stages.values():
            stage.seconds.clear()
        seconds = {"cycle": timing.seconds_of(cycle), "bare": timing.seconds_of(bare)}
        calls = {"sample": 1, "score_step": UPDATES, "train_step": UPDATES}
        for unit in timing.UNITS if index else ():
            for name, stage in stages.items():
                parts[name][unit].append(stage.total(unit) / calls[name])
            for name, value in seconds.items():
                parts[name][unit].append(value[unit])
    of = {name: timing.median(seconds) for name, seconds in parts.items()}
    times = {name: timing.ratio(parts[name], parts["bare"]) for name in ("train_step", "cycle")}
    figures = {
        "sampled_tokens_per_cpu_second": P * G * T / of["sample"]["cpu"],
        "update_cpu_seconds": of["train_step"]["cpu"],
        "old_log_probs_cpu_seconds": of["score_step"]["cpu"],
        "bare_cpu_seconds": of["bare"]["cpu"],
        "cycle_cpu_seconds": statistics.median(cycles["cpu"]),
        "cycle_wall_seconds": statistics.median(cycles["wall"]),
        "first_cycle_wall_seconds": first["wall"],
        "update_times_bare": times["train_step"]["cpu"],
        "cycle_times_bare": times["cycle"]["cpu"],
        "compiled_in_the_first_cycle": of_first,
        "compiled_after_it": recompiled,
        "peak_rss_mib": peak,
    }
    for name, figure in figures.items():
        print(f"{name.replace('_', ' '):<34}{figure:10.3f}")
    timing.write(args.json, vars(args) | {"figures": figures})


if __name__ == "__main__":
    cli.use_huge_pages()
    cli.trim_after_compiling()
    main()
