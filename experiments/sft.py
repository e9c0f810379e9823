"""The supervised warm start of a config page alone; `experiments.train` with the same --workdir goes on from it.

python -m experiments.sft --config=configs/from_scratch.py --workdir=runs/from_scratch
"""

import dataclasses

from absl import flags

from cispo_jax.config import ConfigError
from experiments import cli


def main(config) -> None:
    if not config.sft.num_steps:
        raise ConfigError("config.sft.num_steps=0: this page has no warm start; set the number of supervised updates.")
    cli.start()
    from cispo_jax import trainer

    trainer.train(dataclasses.replace(config, num_steps=0), flags.FLAGS.workdir)


if __name__ == "__main__":
    cli.define_flags()
    cli.run(main)
