"""Trains with CISPO (or another objective) as a config page says.

    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart [--config.section.key=value ...]

Run the same command again to go on where it stopped.
"""

from absl import flags

from experiments import cli


def main(config) -> None:
    cli.start()
    from cispo_jax import trainer  # loads jax: not before the settings are checked, and not in reward workers

    trainer.train(config, flags.FLAGS.workdir, resume=flags.FLAGS.resume)


if __name__ == "__main__":
    cli.define_flags()
    flags.DEFINE_bool(
        "resume", True, "go on with the run in --workdir; --noresume refuses a directory that is not empty"
    )
    cli.run(main)
