"""One update: packed against padded rows, against a bare train step, and its share of what the device can multiply.

    python -m experiments.benchmarks.train_step [--preset=common --rounds=5 --json=FILE]

`common` is a small Qwen3 (8 layers x 256, vocabulary 8,192), other names are those of `config.model.preset`; weights are random. Printed
are medians over the rounds, each of which runs every variant once, and medians of the rounds' ratios:

  packed     the update on responses whose lengths are log-normal, a third of the limit in the mean
  padded     the same responses, one a row (`config.objective.packing=False`)
  full       the update on responses that are all as long as the limit, of one group
  bare       forward, backward and AdamW in a dozen lines of JAX on the rows of `full`, padded, every row with its prompt

On 2 cores of an AMD EPYC (jax 0.10.2): padded takes 2.65 times packed (2.9 on another such machine), full 0.76 times bare; MFU of full
30 % of 354 GFLOP/s (43 % of 203).

MFU: multiplications and additions of the model's products, forward and backward, without what is computed twice, over the rate of a
square matrix product of the same dtype measured here.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cispo_jax import objectives, programs
from cispo_jax.config import OptimizerSettings
from cispo_jax.training.optimizer import make_optimizer
from cispo_jax.training.packing import Layout, pack
from cispo_jax.training.train_step import init_state, make_train_step
from experiments import cli
from experiments.benchmarks import shapes, timing
from experiments.plan import flops


class Update:
    """The product's update on one mini-batch."""

    def __init__(self, model, batch, layout: Layout, **options):
        self.layout = layout
        rows, _ = pack(batch, layout)
        self.rows, self.passes = jax.device_put(rows), int(rows.passes)
        log_probs_fn = lambda model, rows: programs.response_log_probs(model, rows, packed=layout.packed, **options)
        optimizer = make_optimizer(OptimizerSettings(eps=1e-8))
        self.step = make_train_step(log_probs_fn, objectives.cispo_loss, optimizer)
        self.state = init_state(jax.tree.map(jnp.array, model), optimizer)

    def __call__(self):
        self.state, metrics = self.step(self.state, self.rows, np.float32(1e-6))
        return metrics


def model_flops(architecture, *, rows: int, prompt: int, response: int) -> float:
    """Of forward and backward on `rows` rows of [prompt | response]; the head on responses only."""
    tokens = prompt + response
    pairs = rows * tokens * (tokens + 1) // 2
    return 3 * (flops.layers(architecture, rows * tokens, pairs) + flops.head(architecture, rows * response))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="common")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=64, help="the limit of a response, in tokens")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--remat", default="off", choices=["off", "full", "attention"])
    parser.add_argument(
        "--attention", default="blocks", choices=["blocks", "splash", "cudnn"], help="cudnn: of padded rows only"
    )
    parser.add_argument("--pass-tokens", type=int, default=0, help="config.objective.micro_batch_tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="", help="file for the figures")
    args = parser.parse_args(argv)

    architecture = shapes.architecture(args.preset)
    model = shapes.random_model(architecture)
    G, S, T = args.group_size, args.prompt, args.response
    sizes = dict(group_size=G, prompt=S, response=T)
    masks = args.attention != "cudnn"  # segments: rows can be packed
    kernel = {True: args.attention if masks else "blocks", False: args.attention}

    def update(batch, prompts: int, packed: bool) -> Update:
        shared = kernel[packed] == "blocks"
        layout = Layout.of(prompts=prompts, pass_tokens=args.pass_tokens, packed=packed, shared=shared, **sizes)
        return Update(model, batch, layout, dtype=jnp.dtype(args.dtype), remat=args.remat, kernel=kernel[packed])

    lengths = shapes.typical_lengths(args.prompts * G, T)
    typical = shapes.minibatch(architecture.vocab_size, lengths, **sizes)
    full = shapes.minibatch(architecture.vocab_size, np.full(G, T), **sizes)
    variants: dict[str, Callable[[], Any]] = {
        "packed": update(typical, args.prompts, True),
        "padded": update(typical, args.prompts, False),
        "full": update(full, 1, masks),
        "bare": shapes.Bare(model, full, args.dtype),
    }
    found = timing.rounds_of(variants, args.rounds)
    useful = {"packed": int(lengths.sum()), "padded": int(lengths.sum()), "full": G * T, "bare": G * T}
    rate = timing.matmul_rate(args.dtype)
    print(
        f"{jax.devices()[0].device_kind}, {args.preset}, {args.dtype}; responses of {lengths.mean():.0f} of {T} tokens in the mean"
    )
    figures = {}
    for name, variant in variants.items():
        seconds = timing.median(found[name])
        figures[name] = {f"{unit}_seconds": value for unit, value in seconds.items()}
        figures[name]["tokens_per_second"] = useful[name] / seconds["wall"]
        shape = ""
        if isinstance(variant, Update):
            of = variant.layout
            shape = f"   {variant.passes} of {of.passes} passes of {of.rows} x {of.tokens}"
        print(
            f"  {name:<8}{seconds['wall']:9.3f} s{seconds['cpu']:9.3f} CPU s{useful[name] / seconds['wall']:9.0f} useful tokens/s{shape}"
        )
    for name, other in (("padded", "packed"), ("full", "bare")):
        times = timing.ratio(found[name], found[other])
        figures[f"{name}_times_{other}"] = times
        print(f"{name} / {other}: {times['wall']:.2f} wall, {times['cpu']:.2f} CPU")
    work = model_flops(architecture, rows=G, prompt=S, response=T)
    for name in ("full", "bare"):
        figures[name]["mfu"] = work / figures[name]["wall_seconds"] / rate
        print(f"MFU of {name}: {figures[name]['mfu']:.1%} of {rate / 1e9:,.0f} GFLOP/s")
    timing.write(args.json, vars(args) | {"figures": figures, "matmul_flops": rate})


if __name__ == "__main__":
    cli.use_huge_pages()
    cli.trim_after_compiling()
    main()
