r"""Command line: trains, resumes, evaluates or plans the recipe of a gin file.

  python -m rlinf_jax.main --gin_file gin_configs/ppo_push.gin
  python -m rlinf_jax.main --gin_file gin_configs/ppo_push.gin \
    --gin.STEPS=100 --resume
  python -m rlinf_jax.main --gin_file gin_configs/ppo_push.gin --help
  python -m rlinf_jax.main --gin_file gin_configs/ppo_push.gin --eval_only \
    --eval_checkpoint runs/ppo_push --workdir runs/scores
  python -m rlinf_jax.main --gin_file gin_configs/grpo_arithmetic.gin \
    --plan_only --cluster gin_configs/clusters/h100.gin
"""

import math
import os
import pathlib
import shutil
import sys
import tempfile

from absl import app, flags, logging

from planner import cluster
from rlinf_jax import command_line, gin_flags, startup, train
from rlinf_jax.config import config, config_errors
from rlinf_jax.envs import simulator
from rlinf_jax.run_files import checkpoint, result, run_lock
from rlinf_jax.runtime import base
from rlinf_jax.runtime.ray import launch
from rlinf_jax.system import allocator, exit_watcher

flags.adopt_module_key_flags(config)
RESUME = flags.DEFINE_bool('resume', False, 'Continue the run in --workdir.')
PLAN_ONLY = flags.DEFINE_bool(
  'plan_only', False, 'Print the fastest plan and why it is, without training.'
)
CLUSTER = flags.DEFINE_string(
  'cluster',
  'gin_configs/clusters/cpu.gin',
  'For --plan_only: gin file of the hardware, which need not be this machine.',
)
COMPILE = flags.DEFINE_bool(
  'compile',
  False,
  'For --plan_only: compile the plan for the devices of --cluster, which need '
  'not be here; the next fastest plan is taken if the compiler refuses it.',
)
COMPILE_RUNNERS_UP = flags.DEFINE_integer(
  'compile_runners_up',
  0,
  'For --compile: compile so many of the next fastest plans, too.',
  lower_bound=0,
)
PLAN_JSON = flags.DEFINE_string(
  'plan_json', None, 'For --plan_only: JSON file to write the report into.'
)
PLAN_HTML = flags.DEFINE_string(
  'plan_html', None, 'For --plan_only: HTML file to write the report into.'
)
LENGTHS = flags.DEFINE_string(
  'lengths',
  None,
  'For --plan_only: JSON file with a list of completion lengths in tokens, '
  'representative of those that training will generate.',
)
ANSWER_SECONDS = flags.DEFINE_string(
  'answer_seconds',
  None,
  'For --plan_only: text file with the seconds that environments took to '
  'answer, one a line, as episodes.envs.answer_seconds writes it.',
)
HOST_SECONDS = flags.DEFINE_multi_string(
  'host_seconds',
  [],
  'For --plan_only: seconds for one row of a stage that runs outside JAX, such '
  'as simulate=0.02 for a simulator. Without it, those of simulators are '
  'assumed.',
)
PLAN_SECONDS = flags.DEFINE_float(
  'plan_seconds',
  60.0,
  'For --plan_only: CPU seconds after which the search stops, even if it has '
  'not proved that its plan is the fastest. If it has no plan by then, one '
  'that runs all stages on all devices is looked for.',
  lower_bound=0.0,
)
flags.register_validator(
  PLAN_SECONDS, lambda x: not math.isnan(x), 'It must be a number.'
)
EVAL_ONLY = flags.DEFINE_bool(
  'eval_only', False, "Evaluate the recipe's policy without training it."
)
EVAL_CHECKPOINT = flags.DEFINE_string(
  'eval_checkpoint',
  None,
  'For --eval_only: run folder, whose newest checkpoint is evaluated instead '
  "of the recipe's initial policy.",
)

# Errors that the user can fix: they are printed without a traceback.
USER_ERRORS = (
  *command_line.USER_ERRORS,
  checkpoint.CheckpointError,
  base.StageError,
  simulator.UnavailableError,
)


def workdir() -> pathlib.Path:
  """The run folder: --workdir, or runs/ and the name of the last gin file."""
  files = config.GIN_FILE.value
  if not files:
    raise ValueError(
      'No recipe is given. Name one, such as --gin_file '
      'gin_configs/grpo_arithmetic.gin.'
    )
  folder = pathlib.Path(
    config.WORKDIR.value or f'runs/{pathlib.Path(files[-1]).stem}'
  )
  if folder.exists() and not folder.is_dir():
    raise ValueError(f'{folder} is a file: let --workdir name a folder.')
  return folder


def _prepare_output(flag: flags.FlagHolder):
  """Makes the folder of a plan's file, or refuses the file, at the start."""
  if flag.value is None:
    return
  if not PLAN_ONLY.value:
    raise ValueError(
      f'--{flag.name} is the file for a plan that is only looked for: add '
      '--plan_only. A run writes its plan into its folder.'
    )
  path = pathlib.Path(flag.value)
  if path.is_dir():
    raise ValueError(f'--{flag.name}={path} is a folder: name a file in it.')
  path.parent.mkdir(parents=True, exist_ok=True)


def plan_only():
  """Prints the fastest plan of the recipe on the cluster."""
  # Imported here: they load all of the planner.
  from rlinf_jax.planning import answer_times, completion_lengths
  from rlinf_jax.planning import plan_only as plan_only_lib
  from rlinf_jax.planning.compiled import topology
  from rlinf_jax.planning.profiling import host_timing

  files = [*config.GIN_FILE.value, CLUSTER.value]
  lengths = LENGTHS.value and completion_lengths.read(LENGTHS.value)
  seconds = (
    answer_times.read(ANSWER_SECONDS.value) if ANSWER_SECONDS.value else ()
  )
  with tempfile.TemporaryDirectory() as folder:
    config.parse(files, config.GIN_BINDINGS.value, folder)
    hardware = config.call(cluster.Cluster)
    compile_for = None
    if COMPILE.value:
      compile_for = topology.of_cluster(hardware)
      topology.prepare(compile_for)  # Before the recipe starts JAX.
    config.call(
      plan_only_lib.plan_only,
      bindings_of=train.train,
      cluster=hardware,
      lengths=lengths,
      answer_seconds=seconds,
      host_seconds=host_timing.parse(HOST_SECONDS.value),
      plan_seconds=PLAN_SECONDS.value,
      compile_for=compile_for,
      compile_runners_up=COMPILE_RUNNERS_UP.value,
      output=PLAN_JSON.value,
      page=PLAN_HTML.value,
    )


def run(folder: pathlib.Path):
  """Trains or evaluates the recipe in a run folder.

  The folder is removed if that is refused.
  """
  config.parse(config.GIN_FILE.value, config.GIN_BINDINGS.value, str(folder))
  if config.binding(train.train, 'ray_address'):
    # Before a workflow is built, which may compute.
    launch.leave_accelerators()
  fresh = not folder.exists()
  with run_lock.hold(folder):
    try:
      if EVAL_ONLY.value:
        _evaluate(folder)
      else:
        if not RESUME.value:
          # Before gin builds the arguments of `train`, which reads all data.
          result.refuse_existing(folder)
        config.call(train.train, workdir=str(folder), resume=RESUME.value)
    except USER_ERRORS:
      if fresh and not (folder / 'config.gin').exists():
        # The run was refused before it started: nothing of value is in there.
        shutil.rmtree(folder, ignore_errors=True)
      raise


def _evaluate(folder: pathlib.Path):
  """Evaluates the recipe's policy."""
  # Imported here: training needs none of it.
  from rlinf_jax import evaluate

  evaluate.check_folder(folder, RESUME.value)
  config.call(
    evaluate.evaluate,
    bindings_of=train.train,
    workdir=str(folder),
    resume=RESUME.value,
    checkpoint_of=EVAL_CHECKPOINT.value,
    recipe_of=train.train,
  )


def main(_):
  """Runs the recipe; errors that the user can fix are printed in a sentence."""
  # JAX logs which backends there are not.
  logging.set_verbosity(logging.FATAL)
  allocator.retain_freed_memory()
  allocator.claim_accelerators()
  try:
    folder = workdir()
    if COMPILE.value and not PLAN_ONLY.value:
      raise ValueError(
        '--compile compiles a plan for other devices and trains nothing: add '
        '--plan_only.'
      )
    if COMPILE_RUNNERS_UP.value and not COMPILE.value:
      raise ValueError(
        '--compile_runners_up names how many plans are compiled after the '
        'fastest: add --compile.'
      )
    if EVAL_CHECKPOINT.value and not EVAL_ONLY.value:
      raise ValueError(
        '--eval_checkpoint names what is evaluated without training: add '
        '--eval_only.'
      )
    if EVAL_ONLY.value and PLAN_ONLY.value:
      raise ValueError(
        '--eval_only and --plan_only are both given: choose one of them.'
      )
    if RESUME.value and PLAN_ONLY.value:
      raise ValueError(
        '--resume continues the run in --workdir, and --plan_only runs '
        'nothing: leave one of them out. The plan of a run is in its '
        'plan.json.'
      )
    for flag in (PLAN_JSON, PLAN_HTML):
      _prepare_output(flag)
    plan_only() if PLAN_ONLY.value else run(folder)
  except KeyboardInterrupt:
    advice = '' if PLAN_ONLY.value else ' Continue with --resume.'
    print(f'Stopped.{advice}', file=sys.stderr)
    sys.exit(130)
  except USER_ERRORS as error:
    if isinstance(error, checkpoint.CheckpointError):
      _exit(config_errors.text(error))
    command_line.refuse(config_errors.text(error))


def _exit(message: str):
  """Ends the process at once, with a message as the last thing it prints.

  Threads of tensorstore still call into orbax's closed event loop. They would
  print tracebacks after the message, or in the middle of it.
  """
  text = f'{message}\n'.encode(errors='backslashreplace')
  sys.stdout.flush()
  stderr = os.dup(2)
  os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
  os.write(stderr, text)
  exit_watcher.announce()
  os._exit(1)


if __name__ == '__main__':
  with startup.ended():
    app.run(main, flags_parser=gin_flags.parse)
