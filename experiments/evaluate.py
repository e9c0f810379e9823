"""Evaluates a run's newest checkpoint, or the starting model where the directory holds none, on the page's held-out problems.

    python -m experiments.evaluate --config=configs/quickstart.py --workdir=runs/quickstart --config.evaluation.samples=4

Prints the metrics as one JSON line last; the responses go to WORKDIR/evaluations/command_step_000123.jsonl.
"""

import json

from absl import flags

from cispo_jax.config import ConfigError, to_dict
from experiments import cli


def main(config) -> None:
    cli.start()
    from cispo_jax import building, reporting, storage
    from cispo_jax.trainer import RunState
    from cispo_jax.training.checkpoint import Checkpoints

    run = building.build(config)
    workdir = storage.absolute(flags.FLAGS.workdir)
    reporting.compare_config(workdir, to_dict(config))
    checkpoints = Checkpoints(workdir / "checkpoints", keep=config.checkpoint.keep)
    step = checkpoints.latest() if flags.FLAGS.step is None else flags.FLAGS.step
    if step is None:
        reporting.say("no checkpoint in this directory: evaluating the starting model")
        state = RunState(run.init_state(run.make_model()))
    elif step not in checkpoints.steps():
        raise ConfigError(
            f"--step={step}: {workdir} holds the steps {', '.join(map(str, checkpoints.steps())) or 'none'}."
        )
    else:
        train_state, host = checkpoints.restore(step, run.abstract_state, run.shardings)
        state = RunState(train_state, step, host["position"])
    metrics = reporting.evaluate_and_record(run, state, workdir, name=f"command_step_{state.step:06d}")
    checkpoints.close()
    run.score.close()
    reporting.say(json.dumps({"step": state.step, **metrics}))


if __name__ == "__main__":
    cli.define_flags()
    flags.DEFINE_integer("step", None, "rollout step of the checkpoint; default the newest")
    cli.run(main)
