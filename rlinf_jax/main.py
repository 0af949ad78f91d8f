"""Trains what a gin file describes.

  python -m rlinf_jax.main --gin_file gin_configs/grpo_arithmetic.gin
  python -m rlinf_jax.main --gin_file ... --gin_bindings 'STEPS = 50' --resume
  python -m rlinf_jax.main --gin_file ... --plan_only \
    --cluster gin_configs/clusters/h100x64.gin

This file is short on purpose: everything it could do is in a library.
"""

import functools
import os
import pathlib
import shutil
import sys
import tempfile

from absl import app, flags, logging

from planner import cluster
from rlinf_jax import config, train
from rlinf_jax.run import allocator, checkpoint
from rlinf_jax.runtime import base

flags.adopt_module_key_flags(config)
RESUME = flags.DEFINE_bool('resume', False, 'Go on with the run in --workdir.')
PLAN_ONLY = flags.DEFINE_bool(
  'plan_only', False, 'Say which plan would be fastest, and run nothing.'
)
CLUSTER = flags.DEFINE_string(
  'cluster',
  'gin_configs/clusters/cpu.gin',
  'For --plan_only: the gin file of the hardware, which need not be here.',
)
PLAN_JSON = flags.DEFINE_string(
  'plan_json', None, 'For --plan_only: a file for the same as JSON.'
)
PLAN_HTML = flags.DEFINE_string(
  'plan_html', None, 'For --plan_only: a file for the same as a page.'
)
LENGTHS = flags.DEFINE_string(
  'lengths',
  None,
  'For --plan_only: a JSON list of the tokens of completions, as long as those '
  'that will be made.',
)

# What a person did or a disk refused, and can mend: a sentence, no traceback.
MENDABLE = (
  ValueError,
  OSError,
  ImportError,
  checkpoint.CheckpointError,
  base.StageError,
)


def workdir() -> pathlib.Path:
  """--workdir, or a folder named after the last gin file."""
  files = config.GIN_FILE.value
  if not files:
    raise ValueError(
      'There is nothing to run: name a recipe, such as --gin_file '
      'gin_configs/grpo_arithmetic.gin.'
    )
  return pathlib.Path(
    config.WORKDIR.value or f'runs/{pathlib.Path(files[-1]).stem}'
  )


def plan_only():
  """Prints which plan the recipe should have on the cluster."""
  from rlinf_jax.planning import plan_report  # It brings in all of the planner.

  files = [*config.GIN_FILE.value, CLUSTER.value]
  lengths = LENGTHS.value and plan_report.read_lengths(LENGTHS.value)
  with tempfile.TemporaryDirectory() as folder:  # Nothing is left behind.
    config.parse(files, config.GIN_BINDINGS.value, folder)
    tell = functools.partial(
      plan_report.advise,
      cluster=config.call(cluster.Cluster),
      lengths=lengths,
      output=PLAN_JSON.value,
      page=PLAN_HTML.value,
    )
    config.call(train.train, workdir=folder, instead=tell)


def main(_):
  """Runs the recipe; a fault that a person can mend ends in one sentence."""
  # orbax says forty things a save; what fails, `checkpoint` tells.
  logging.set_verbosity(logging.FATAL)
  allocator.keep()
  os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')
  folder = None
  try:
    folder = workdir()
    if PLAN_ONLY.value:
      folder = None
      plan_only()
      return
    fresh = not folder.exists()
    config.parse(config.GIN_FILE.value, config.GIN_BINDINGS.value, str(folder))
    config.call(train.train, workdir=str(folder), resume=RESUME.value)
  except KeyboardInterrupt:
    print('Stopped. Go on with --resume.', file=sys.stderr)
    sys.exit(130)
  except MENDABLE as error:
    if folder and fresh and not (folder / 'config.gin').exists():
      # It was refused at the door: only preparations can be there.
      shutil.rmtree(folder, ignore_errors=True)
    print(config.message(error), file=sys.stderr, flush=True)
    if isinstance(error, checkpoint.CheckpointError):
      # Threads of tensorstore still call into orbax's closed event loop; their
      # tracebacks would bury the sentence.
      os._exit(1)
    sys.exit(1)


if __name__ == '__main__':
  app.run(main)
