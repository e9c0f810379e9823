"""Compiles a page's programs for devices that need not be at hand, and says whether they fit and what bounds their speed.

    python -m experiments.plan --config=configs/debug.py --topology=cpu:8 [--json=FILE] [--config.section.key=value ...]
    .venv-plan/bin/python -m experiments.plan --config=configs/qwen2p5_32b_dapo_math.py --topology=v5p:4x4x8     (make plan-env)

The train step, the reshard to the sampling layout, prefill and decode are those of the run (`cispo_jax.programs`), with rows and lengths of
the settings; nothing is downloaded. On gpu:N --hbm_gib=G nothing is compiled: the figures are arithmetic. Exit code 3: it does not fit.

JSON: "train_step", "reshard", "prefill" and "decode" each hold "argument_bytes", "output_bytes", "temp_bytes", "peak_bytes" (the
compiler's), "resident_bytes" (the training state, while others run), "needed_bytes", "hbm_bytes", "fits", "flops" and
"collective_bytes" {mesh axis: bytes that leave a device}, "roofline" {seconds}; all per device, of decode per token of every row.
"""

import json
import sys

from absl import flags

from experiments import cli


def main(config) -> int:
    from experiments.plan import chips

    chips.prepare_environment()
    cli.quiet()
    from experiments.plan import planning, report

    topology = chips.find(flags.FLAGS.topology, slices=flags.FLAGS.slices, hbm_gib=flags.FLAGS.hbm_gib)
    say = lambda text: print(text, file=sys.stderr, flush=True)
    plan = planning.plan(config, topology, slices=flags.FLAGS.slices, programs=_programs(), say=say)
    print(report.table(plan))
    if flags.FLAGS.json:
        with open(flags.FLAGS.json, "w") as file:
            json.dump(plan, file, indent=1)
    return 0 if plan["fits"] else 3


def _programs() -> tuple[str, ...]:
    from cispo_jax.config import ConfigError, suggest
    from experiments.plan.planning import PROGRAMS

    chosen = tuple(flags.FLAGS.programs.split(",")) if flags.FLAGS.programs else PROGRAMS
    for name in chosen:
        if name not in PROGRAMS:
            raise ConfigError(f"--programs={name}: valid are {', '.join(PROGRAMS)}.{suggest(name, PROGRAMS)}")
    return chosen


if __name__ == "__main__":
    cli.define_flags(workdir=False)
    flags.DEFINE_string("topology", "cpu:8", "v5p:4x4x8 (v4, v5e, v5p, v6e and a shape of chips), cpu:8 or gpu:8")
    flags.DEFINE_integer("slices", 1, "how many of them, connected by the data-centre network")
    flags.DEFINE_float("hbm_gib", 0.0, "memory of a device in GiB where it is not the published one; needed for gpu:N")
    flags.DEFINE_string("json", "", "file for the plan as JSON")
    flags.DEFINE_string("programs", "", "only these: train_step,reshard,prefill,decode")
    cli.run(main)
