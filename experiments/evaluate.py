"""Evaluates a run's newest checkpoint, or the starting model where the directory holds none, on held-out problems and benchmarks.

    python -m experiments.evaluate --config=configs/quickstart.py --workdir=runs/quickstart --config.evaluation.samples=4
    python -m experiments.evaluate --compare=runs/a/evaluations/step_000008.jsonl,runs/b/evaluations/step_000008.jsonl

Prints the metrics as one JSON line last; records, one a problem, go to WORKDIR/evaluations/command_step_000123.jsonl. An evaluation that
was killed goes on where it stopped. `--compare` needs no page: it pairs the problems of two record files by their id and prints the
difference, its 95 % bootstrap interval over problems and the p-value of a paired permutation test.
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
        state = RunState(train_state, step, host)
    metrics = reporting.evaluate_and_record(run, state, workdir, name=f"command_step_{state.step:06d}")
    checkpoints.close()
    run.score.close()
    reporting.say(json.dumps({"step": state.step, **metrics}))


def compare(text: str) -> None:
    from cispo_jax import evaluation

    paths = text.split(",")
    if len(paths) != 2:
        raise ConfigError(f"--compare={text}: two files of records, A.jsonl,B.jsonl.")
    before, after = (evaluation.read_records(path) for path in paths)
    found = dict(evaluation.paired(before, after))
    for metric, values in found.items():
        interval = f"95 % interval {values['low']:+.1%} to {values['high']:+.1%}"
        print(
            f"{metric:<10}{values['difference']:+.1%}  {interval}  p = {values['p_value']:.4f}  ({values['problems']:.0f} problems)"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    cli.define_flags()
    flags.DEFINE_integer("step", None, "rollout step of the checkpoint; default the newest")
    flags.DEFINE_string(
        "compare", None, "A.jsonl,B.jsonl: compare two evaluations, problem by problem, and do nothing else"
    )
    cli.run(main, instead={"compare": compare})
