"""Lightning attention: how time and memory grow with the length, in training and in decoding.

    python -m experiments.benchmarks.lightning [--heads=4 --head_dim=32 --rounds=5 --json=FILE]

Forward + backward of one layer's attention at 4k and 16k tokens (linear: 4 times; quadratic would be 16), and a decoded token of a
model of two lightning layers with room for 1k and 64k tokens (its state has one size). Each round runs every length once, so that a
busy machine slows all of them; printed are medians over the rounds and medians of the rounds' ratios.

On 2 cores of an AMD EPYC, jax 0.10.2: training 16k / 4k tokens 4.00 x the time (0.519 / 0.132 s) and 2.89 x the temporary memory;
a decoded token at 64k / 1k 1.00 x.
"""

import argparse
import functools
import json
import platform
import statistics
import time

import jax
import jax.numpy as jnp

from cispo_jax.models import Transformer, TransformerConfig, decode_step, prefill
from cispo_jax.models.lightning import lightning_attention, slopes

LENGTHS, CONTEXTS, DECODED = (4_096, 16_384), (1_024, 65_536), 64


def config_of(args) -> TransformerConfig:
    D = args.heads * args.head_dim
    return TransformerConfig(
        256, D, 2, args.heads, args.heads, args.head_dim, 2 * D, attention=("lightning",), lightning_block=args.block
    )


def training(config: TransformerConfig, length: int):
    """The compiled gradient of a sum of heads with respect to queries, keys and values, and its inputs."""
    shape = (1, length, config.num_heads, config.head_dim)
    inputs = [jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 3)]
    real = jnp.ones(shape[:2], bool)

    def loss(query, key, value):
        attention = functools.partial(lightning_attention, block=config.lightning_block)
        return jnp.sum(attention(query, key, value, jnp.asarray(slopes(config)[0]), real, ~real)[0] ** 2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*inputs).compile(), inputs


def decoding(config: TransformerConfig, context: int):
    """The compiled decoding of `DECODED` tokens at the end of the context, and its inputs."""
    model = jax.jit(lambda: Transformer(config, key=jax.random.key(0)))()
    tokens = jnp.ones((8, 16), jnp.int32)
    start = functools.partial(prefill, copies=1, room=context - 16)
    cache = jax.jit(start)(model, tokens, tokens > 0)[1]

    def decode(model, cache):
        def one(i, carry):
            hidden_BD, cache = carry
            token_B = jnp.argmax(hidden_BD, axis=-1).astype(jnp.int32)  # some function of the last one
            slot = context - DECODED + i
            return decode_step(model, token_B, jnp.full(8, slot), cache, slot)

        return jax.lax.fori_loop(0, DECODED, one, (jnp.zeros((8, config.embed_dim)), cache))[0]

    return jax.jit(decode).lower(model, cache).compile(), (model, cache)


def timed(cases: dict, rounds: int) -> dict:
    """Seconds of every case in every round, after one to warm up."""
    seconds: dict = {name: [] for name in cases}
    for round_ in range(rounds + 1):
        for name, (compiled, inputs) in cases.items():
            start = time.perf_counter()
            jax.block_until_ready(compiled(*inputs))
            if round_:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head_dim", type=int, default=32)
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="", help="file to write the results to")
    args = parser.parse_args()
    config = config_of(args)
    rows = []
    for what, make, lengths in (("train", training, LENGTHS), ("decode", decoding, CONTEXTS)):
        cases = {length: make(config, length) for length in lengths}
        seconds = timed(cases, args.rounds)
        memory = {length: compiled.memory_analysis().temp_size_in_bytes for length, (compiled, _) in cases.items()}
        short, long = lengths
        row = {
            "name": what,
            "lengths": lengths,
            "seconds": [statistics.median(seconds[length]) for length in lengths],
            "ratio": statistics.median(b / a for a, b in zip(seconds[short], seconds[long], strict=True)),
            "temp_mib": [memory[length] / 2**20 for length in lengths],
            "temp_ratio": memory[long] / max(memory[short], 1),
        }
        rows.append(row)
        print(
            f"{what:6} {long} / {short}: time {row['ratio']:.2f} ({row['seconds'][1]:.3f} / {row['seconds'][0]:.3f} s), "
            f"temporary memory {row['temp_ratio']:.2f} ({row['temp_mib'][1]:.1f} / {row['temp_mib'][0]:.1f} MiB)"
        )
    if args.json:
        result = {**vars(args), "jax": jax.__version__, "device": str(jax.devices()[0]), "machine": platform.machine()}
        with open(args.json, "w") as file:
            json.dump({**result, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
