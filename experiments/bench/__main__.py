"""Measures a step of what a gin file describes.

  python -m experiments.bench --gin_file gin_configs/bench/grpo_step.gin

Prints a table and, last, one JSON line.
"""

from absl import app

from experiments.bench import step
from rlinf_jax import config


def main(_):
  config.parse(config.GIN_FILE.value, config.GIN_BINDINGS.value, '')
  config.call(step.bench)


if __name__ == '__main__':
  app.run(main)
