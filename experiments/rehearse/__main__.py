"""Runs the whole life of a config in minutes on a CPU: train, SIGTERM, resume on another mesh, evaluate, export.

    python -m experiments.rehearse --config=configs/debug.py [--devices=128] [--workdir=DIR] [--config.section.key=value ...]

First everything but the weights is put together at full size: settings, objective, rewards, data, prompts, and the mesh over --devices
(by default the fewest that it allows). Then widths, depth, lengths and counts shrink, and the commands of the run are started one after
the other on 8 fake devices. What is not on this machine (a hub's weights or tokenizer, a data file) is stood in for; nothing is fetched.
What was shrunk and what stands in is printed. An error of the config is that of training, with its exit code 2; any other failure is 1.
"""

import dataclasses
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from absl import flags

from cispo_jax.config import ConfigError
from experiments import cli


def main(config) -> int:
    given, started = flags.FLAGS.workdir, time.monotonic()
    if given and Path(given).is_dir() and any(Path(given).iterdir()):
        raise ConfigError(f"--workdir={given} is not empty: a rehearsal starts in a new directory.")
    folder = Path(given or tempfile.mkdtemp(prefix="rehearsal_")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    code = 1
    try:
        code = _rehearse(config, folder)
    finally:
        failed = code != 0 and (folder / "logs").exists()  # else there is nothing to look into
        if given or flags.FLAGS.keep or failed:
            print(f"everything is in {folder}", flush=True)
        else:
            shutil.rmtree(folder)
    if code == 0:
        print(f"passed in {time.monotonic() - started:.0f} s")
    return code


def _rehearse(config, folder: Path) -> int:
    from experiments.rehearse import shrink

    _use_fake_devices(flags.FLAGS.devices or shrink.fewest_devices(config.mesh))
    from cispo_jax import building
    from experiments.rehearse import reading, stages, stand_ins

    table = stages.Table()
    with table.stage("settings") as said:
        whole, model, notes = stand_ins.find(config, folder)
        run = building.build(whole, model=model)
        run.score.close()
        small = shrink.shrink(config, demonstration=_longest_demonstration(run))
        settings, architecture, full = stand_ins.small_model(run, config, folder)
        small = dataclasses.replace(small, model=settings, data=stand_ins.small_files(run, small, folder))
        small = dataclasses.replace(small, evaluation=stand_ins.small_sets(run, small))
        said.append(f"at full size, {run.mesh.size} device(s)")
    changed = shrink.changes(config, small)
    _print_changes(changed, shrink.changes(full, architecture), notes)

    _, own = cli.take_settings(sys.argv)
    life = stages.Life(
        folder,
        [f"--config={flags.FLAGS.config}", *(f"--config.{name}={text}" for name, text in own)],
        [f"--config.{name}={value}" for name, (_, value) in changed.items()],
        small,
    )
    name = ""
    try:
        for name in ("train", "resume", "evaluate", "export"):
            with table.stage(name) as said:
                said.append(getattr(life, name)())
        name = "read back"
        with table.stage(name) as said:
            said.append(reading.compare(life, architecture, run.tokenizer, run.problems.train[0]["prompt"]))
        name = "report"
        with table.stage(name) as said:
            said.append(life.report())
    except stages.Failed as failure:
        print(failure, file=sys.stderr)
        log = folder / "logs" / f"{name}.log"
        print(f"stage {name!r} failed" + (f"; its log is {log}" if log.exists() else ""), file=sys.stderr)
        return failure.code
    return 0


def _use_fake_devices(count: int) -> None:
    """So many CPU devices in this process, which compiles next to nothing for them; before jax starts."""
    import jax

    os.environ["HF_HUB_OFFLINE"] = "1"
    cli.quiet()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def _longest_demonstration(run) -> int:
    """Tokens with the end, of those that the small run will read; 0 without a warm start."""
    if not run.config.sft.num_steps:
        return 0
    return max(len(run.tokenizer.encode(run.problems.train[i]["response"])) + 1 for i in range(len(run.problems.train)))


def _print_changes(changed, narrowed, notes) -> None:
    print("shrunk or replaced (of the config -> here):")
    for name, (before, after) in [*changed.items(), *((f"architecture.{n}", pair) for n, pair in narrowed.items())]:
        print(f"  {name:<32}{_shown(before)} -> {_shown(after)}")
    for note in notes:
        print(f"note: {note}.")
    print("stages:", flush=True)


def _shown(value) -> str:
    return (
        "none"
        if value in (None, "")
        else f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else str(value)
    )


if __name__ == "__main__":
    cli.define_flags(workdir=False)
    flags.DEFINE_string(
        "workdir", "", "new directory for the rehearsal; default: a temporary one, removed unless it fails"
    )
    flags.DEFINE_bool("keep", False, "keep the temporary directory")
    flags.DEFINE_integer("devices", 0, "devices of the real run, whose mesh is checked; 0 = the fewest that it allows")
    cli.run(main)
