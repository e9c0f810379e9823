"""Writes a run's newest checkpoint as a Hugging Face model folder, for transformers, vLLM and others.

    python -m experiments.export --config=configs/quickstart.py --workdir=runs/quickstart [--output=DIR] [--step=8] [--dtype=bfloat16]

Without --output: WORKDIR/export/step_000123. Without --dtype: that of the files which the run started from (float32 from a preset or a
GGUF). Under several processes start it in each, as training; the folder must be a place that all of them share.
"""

from absl import flags

from cispo_jax.config import ConfigError
from experiments import cli


def main(config) -> None:
    cli.start()
    from etils import epath

    from cispo_jax import building, reporting, storage, weights
    from cispo_jax.training.checkpoint import Checkpoints

    dtypes = ("float32", "bfloat16", "float16")
    if flags.FLAGS.dtype not in (None, *dtypes):
        raise ConfigError(f"--dtype={flags.FLAGS.dtype}: valid values are {', '.join(dtypes)}.")
    run = building.build(config)
    workdir = storage.absolute(flags.FLAGS.workdir)
    checkpoints = Checkpoints(workdir / "checkpoints", keep=config.checkpoint.keep)
    step = checkpoints.latest() if flags.FLAGS.step is None else flags.FLAGS.step
    if step is None:
        raise ConfigError(f"--workdir={workdir} holds no checkpoint: train first.")
    if step not in checkpoints.steps():
        listed = ", ".join(map(str, checkpoints.steps())) or "none"
        raise ConfigError(f"--step={step}: {workdir} holds checkpoints of the steps {listed}.")
    model = checkpoints.restore_model(step, run.abstract_state.model, run.shardings.model)
    checkpoints.close()
    run.score.close()
    output = epath.Path(flags.FLAGS.output or workdir / "export" / f"step_{step:06d}")
    weights.save_pretrained(output, model, model.config, run.tokenizer, dtype=flags.FLAGS.dtype)
    reporting.say(f"rollout step {step}: {output}")


if __name__ == "__main__":
    cli.define_flags()
    flags.DEFINE_integer("step", None, "rollout step of the checkpoint; default the newest")
    flags.DEFINE_string("output", None, "folder to write; default WORKDIR/export/step_...")
    flags.DEFINE_string("dtype", None, "of the tensors: float32 | bfloat16 | float16")
    cli.run(main)
