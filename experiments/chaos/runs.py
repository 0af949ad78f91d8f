"""Small runs of several kinds, and how two of them are compared."""

import json
import os
import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
WORDS = (
  'STEPS = 6',
  'workflows.grpo.entropy_coef = 0.05',
  'GROUP = 4',
  "train.train.plan = {'micro_batch': {'gradient': 8}}",
  'train.train.evaluate_every = 3',
  'train.train.checkpoint_every = 2',
  'arithmetic.problems.batch_size = 4',
  'arithmetic.problems.held_out = 8',
  'arithmetic.problems.held_out_batch = 8',
)
PLACES = (
  "train.train.plan = {'micro_batch': {'gradient': 8}, 'places': {"
  "'actor': {'devices': [0]}, 'learner': {'devices': [1]}}, 'stages': {"
  "'repeat': 'actor', 'keys': 'actor', 'generate': 'actor', '*': 'learner'}}"
)
# By kind: a recipe and its bindings.
KINDS = {
  'words': ('grpo_arithmetic', WORDS),
  'processes': (
    'grpo_arithmetic',
    (*WORDS, PLACES, "train.train.ray_address = 'local'"),
  ),
  'robots': (
    'ppo_push',
    (
      'STEPS = 8',
      'workflows.embodied_ppo.num_envs = 16',
      'UPDATES = 2',
      'train.train.evaluate_every = 4',
      'train.train.checkpoint_every = 2',
      'seed_source.seeds.held_out = 8',
      'seed_source.seeds.held_out_batch = 8',
    ),
  ),
  'simulators': (
    'ppo_cartpole',
    (
      'STEPS = 6',
      'ENVS = 4',
      'gymnasium.env.num_processes = 2',
      'workflows.embodied_ppo.num_steps = 32',
      'train.train.evaluate_every = 3',
      'train.train.checkpoint_every = 2',
      'seed_source.seeds.held_out = 4',
    ),
  ),
}
# After those above, so that trials keep their meaning.
KINDS['vllm'] = ('grpo_arithmetic_vllm', WORDS)
# Metrics of time, and of the machine.
OF_TIME = ('time/', 'throughput/', 'utilization/', 'wait/', 'memory/')
MARK = 'RLINF_JAX_CHAOS'  # Environment variable of the processes of a trial.


def model(kind: str, folder: pathlib.Path) -> str:
  """The folder of a small language model for a kind, which is made once."""
  # Imported here: it imports JAX, and a trial is watched without.
  from rlinf_jax.prepare import warm_start
  from stages.tasks import arithmetic

  # vLLM has no attention for heads that are narrower than 32 on CPUs.
  wide = kind == 'vllm'
  return warm_start.checkpoint(
    str(folder / ('wide_model' if wide else 'model')),
    corpus=arithmetic.corpus,
    vocabulary=64,
    width=128 if wide else 32,
    layers=2,
    heads=4,
    kv_heads=2,
    feed_forward=64,
  )


def command(
  kind: str, folder: pathlib.Path, start: str, resume: bool
) -> list[str]:
  """The command line of a run.

  Args:
    kind: of `KINDS`.
    folder: the run folder.
    start: folder of the model that language models start from.
    resume: whether a run in that folder is continued.
  """
  recipe, bindings = KINDS[kind]
  if recipe.startswith('grpo_arithmetic'):
    bindings = (*bindings, f'CHECKPOINT = "{start}"')
  return [
    *(sys.executable, '-m', 'rlinf_jax.main'),
    f'--gin_file=gin_configs/{recipe}.gin',
    *(f'--gin_bindings={binding}' for binding in bindings),
    f'--workdir={folder}',
    *(['--resume'] if resume else []),
  ]


def environment(mark: str, temporary: pathlib.Path, cache: pathlib.Path):
  """Environment variables of the processes of a trial."""
  temporary.mkdir(parents=True, exist_ok=True)
  return os.environ | {
    MARK: mark,
    'TMPDIR': str(temporary),
    'RAY_TMPDIR': str(temporary),
    'JAX_PLATFORMS': 'cpu',
    'JAX_NUM_CPU_DEVICES': '2',
    'JAX_COMPILATION_CACHE_DIR': str(cache / 'jax'),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'RLINF_JAX_CACHE': str(cache / 'measured'),
    'HF_HUB_OFFLINE': '1',
    # Compiling would be most of what a trial costs.
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    'XLA_FLAGS': '--xla_cpu_parallel_codegen_split_count=1',
  }


def metrics(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
  """Metrics of a run but those of time, by step and whether of evaluation."""
  found = {}
  path = folder / 'metrics.jsonl'
  for line in path.read_text().splitlines() if path.exists() else ():
    values = json.loads(line)
    kept = {k: v for k, v in values.items() if not k.startswith(OF_TIME)}
    kind = 'eval' if any(k.startswith('eval/') for k in kept) else 'train'
    found[f'{kind} {values["step"]}'] = kept
  return found


def phase(folder: pathlib.Path) -> str:
  """The phase of a run, as far as its folder tells."""
  if not (folder / 'config.gin').exists():
    return 'set-up'
  if (folder / 'model.part').exists() or (folder / 'model').exists():
    return 'export or later'
  if any((folder / 'checkpoints').glob('*tmp*')):
    return 'checkpoint'
  keys = [*metrics(folder)]
  if not keys:
    return 'measuring or compiling'
  return 'evaluation' if 'eval' in keys[-1] else 'step'
