"""Fused token log-probs against the naive path (all logits at once), forward and backward, timed in pairs.

    python -m experiments.benchmarks.log_probs [--tokens=4096 --embed=256 --vocab=50000 --json=FILE]

Prints a table and writes JSON: seconds (median over the rounds; each round runs every variant once, so that a busy machine slows
all of them), the median of the ratios to the naive path of the same round, and the compiler's temporary memory.
On 2 cores of an AMD EPYC (jax 0.10.2): chunks of 256 take 0.57 times the naive time (0.88 on another such machine) and 155 MiB of
temporary memory in place of 3,125.
"""

import argparse
import json
import platform
import statistics
import time

import jax
import jax.numpy as jnp

from cispo_jax.log_probs import fused_token_log_probs, head_logits


def naive(hidden, head, tokens):
    log_p = jax.nn.log_softmax(head_logits(hidden, head))
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return jnp.take_along_axis(log_p, tokens[:, None], axis=-1)[:, 0], entropy


def variants(chunk_sizes):
    def with_loss(token_log_probs):
        def loss(hidden, head, tokens, weights):
            log_probs, entropy = token_log_probs(hidden, head, tokens)
            return jnp.sum(weights * log_probs) + 0.01 * jnp.mean(entropy)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))

    yield "naive", with_loss(naive)
    for size in chunk_sizes:
        yield f"fused/{size}", with_loss(lambda *args, size=size: fused_token_log_probs(*args, chunk_size=size))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--embed", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="", help="file to write the results to")
    args = parser.parse_args()

    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (args.tokens, args.embed)).astype(args.dtype)
    head = (jax.random.normal(keys[1], (args.embed, args.vocab)) * args.embed**-0.5).astype(args.dtype)
    tokens = jax.random.randint(keys[2], (args.tokens,), 0, args.vocab)
    inputs = (hidden, head, tokens, jax.random.normal(keys[3], (args.tokens,)))

    compiled = {name: fn.lower(*inputs).compile() for name, fn in variants(args.chunk_sizes)}
    seconds = {name: [] for name in compiled}
    for round_ in range(args.rounds + 1):
        for name, fn in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(fn(*inputs))
            if round_:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    rows = [
        {
            "name": name,
            "seconds": statistics.median(seconds[name]),
            "times_naive": statistics.median(a / b for a, b in zip(seconds[name], seconds["naive"], strict=True)),
            "temp_mib": fn.memory_analysis().temp_size_in_bytes / 2**20,
        }
        for name, fn in compiled.items()
    ]
    print(f"{'':12} {'seconds':>8} {'x naive':>8} {'temp MiB':>9}")
    for row in rows:
        print(f"{row['name']:12} {row['seconds']:8.3f} {row['times_naive']:8.2f} {row['temp_mib']:9.0f}")
    if args.json:
        result = {
            **vars(args),
            "jax": jax.__version__,
            "device": str(jax.devices()[0]),
            "machine": platform.machine(),
            "rows": rows,
        }
        with open(args.json, "w") as file:
            json.dump(result, file, indent=2)


if __name__ == "__main__":
    main()
