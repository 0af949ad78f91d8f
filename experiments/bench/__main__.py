"""Measures a training step of a recipe.

  python -m experiments.bench --gin_file gin_configs/bench/grpo_step.gin

Prints a table and, as the last line, JSON.
"""

from absl import app

from experiments.bench import step
from rlinf_jax.config import config


def main(_):
  """Runs the benchmark that the gin file configures."""
  config.parse(config.GIN_FILE.value, config.GIN_BINDINGS.value, '')
  config.call(step.bench)


if __name__ == '__main__':
  app.run(main)
