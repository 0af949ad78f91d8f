"""Recipes of RL for vision-language-action models run, with small models."""

import importlib.util
import json
import os
import string

import jax
import numpy as np
import pytest
from safetensors import numpy as files

import pictured_push
from rlinf_jax import train
from rlinf_jax.config import config
from rlinf_jax.envs import libero_files, maniskill, simulator
from rlinf_jax.prepare import tiny_vla
from stages.language import tokens
from stages.models.vision import vit
from stages.vla import normalization
from stages.vla.openvla import openvla_oft_files
from stages.vla.pi0 import pi0, pi0_files

pytestmark = pytest.mark.slow
LETTERS = f'{string.ascii_letters} 1234567890,.:?\n'
TOWER = {'image_size': 32, 'patch_size': 8, 'D': 32, 'L': 2, 'H': 2, 'F': 64}
# Of both transformers, which share attention; and widths.
SHARED, D, F, V = {'L': 2, 'H': 2, 'W': 16}, 32, 64, 256
needs_libero = pytest.mark.skipif(
  importlib.util.find_spec('libero') is None
  or not os.environ.get(libero_files.ASSETS),
  reason=f'LIBERO is not installed, or {libero_files.ASSETS} does not say '
  'where its meshes are.',
)


def run(recipe, bindings, workdir):
  """Metrics of a run, the last ones under each name."""
  config.parse([recipe], [*bindings, 'train.train.plan = None'], str(workdir))
  config.call(train.train, workdir=str(workdir))
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  found = {}
  for line in lines:
    found |= json.loads(line)
  return found


@needs_libero
def test_grpo_of_openvla_oft_acts_in_libero_by_pictures_and_words(tmp_path):
  model = tmp_path / 'given'
  tiny_vla.model(model, tasks=[LETTERS], actions=7)
  metrics = run(
    'gin_configs/grpo_openvla_oft_libero.gin',
    [
      f'MODEL = {str(model)!r}',
      'DATA_SET = None',
      'GRIPPER_OPENS = False',
      'STEPS = 1',
      'ENVIRONMENTS = 2',
      'EVAL_ENVIRONMENTS = 1',
      'PROCESSES = 1',
      'HORIZON = 16',
      'GROUP = 2',
      'libero.env.image_size = 64',
      'libero.env.task_ids = (0,)',
      'seed_source.seeds.held_out = 1',
      'instructions.openvla.length = 192',  # A token is a character.
    ],
    tmp_path / 'run',
  )
  assert metrics['env/steps'] == 2 * 16 and not metrics.get('env/failed')
  assert np.isfinite(metrics['train/grad_norm'])
  made, _ = openvla_oft_files.read(tmp_path / 'run/model')
  assert made.A == 7 and made.head == 'token'


def small_pi0(folder, actions, *, adaptive, Z, state=None):
  """Writes a π0 or π0.5, its statistics and a tokenizer; returns bindings."""
  trunk = pi0.GEMMA(V=V, D=D, F=F, **SHARED)
  expert = pi0.GEMMA(V=1, D=D, F=F, **SHARED)
  tower = vit.Config(**TOWER)
  made = pi0.Config(tower, trunk, expert, Z, 32, 32, adaptive)
  params = pi0.init_params(made, jax.random.key(0))
  assert sum(x.size for x in jax.tree.leaves(params)) < 5e6
  pi0_files.write(folder, params, made)
  tokens.train_tokenizer(folder, [LETTERS], 90)
  numbers = {'mean': 0.0, 'std': 0.5, 'q01': -1.0, 'q99': 1.0}
  stats = lambda n: {name: [x] * n for name, x in numbers.items()}
  normalization.write(
    folder,
    'data',
    {'state': stats(state or actions), 'actions': stats(actions)},
  )
  return [
    f'MODEL = {str(folder)!r}',
    *(f'vit.Config.{name} = {size}' for name, size in TOWER.items()),
    *(f'pi0.GEMMA.{name} = {size}' for name, size in SHARED.items()),
    *(
      f'{part}/pi0.GEMMA.{name} = {size}'
      for part in ('trunk', 'expert')
      for name, size in (('D', D), ('F', F))
    ),
    f'trunk/pi0.GEMMA.V = {V}',
    "DTYPE = 'float32'",
    'instructions.pi0.length = 64',  # A token is a character.
  ]


def pictures_of_maniskill() -> bool:
  """Whether ManiSkill is here and can render."""
  try:
    maniskill.make(0, 'PickCube-v1', images=True, image_size=32).close()
  except simulator.UnavailableError:
    return False
  return True


@pytest.mark.parametrize('world', ['push', 'maniskill'])
def test_ppo_of_pi05_acts_by_pictures_and_instructions(
  world, tmp_path, monkeypatch
):
  actions = 7
  if world == 'push':
    actions = pictured_push.ACTIONS
    pictured_push.replace_pools(monkeypatch)
  elif not pictures_of_maniskill():
    pytest.skip('ManiSkill is not installed, or has no Vulkan device.')
  model = tmp_path / 'given'
  bindings = small_pi0(model, actions, adaptive=True, Z=8)
  metrics = run(
    'gin_configs/ppo_pi05_maniskill.gin',
    [
      *bindings,
      'STEPS = 2',
      'ENVIRONMENTS = 4',
      'PROCESSES = 1',
      'HORIZON = 10',
      'workflows.embodied_ppo.num_steps = 4',
      'maniskill.env.image_size = 32',
      # So that the step is seen in weights of float32.
      'actor/optimizers.adamw.learning_rate = 1e-2',
    ],
    tmp_path / 'run',
  )
  assert metrics['env/steps'] == 4 * 4 * 5
  assert metrics['train/clip_fraction'] >= 0
  assert np.isfinite(metrics['train/value_loss'])
  before, after = (
    files.load_file(folder / 'model.safetensors')
    for folder in (model, tmp_path / 'run/model')
  )
  moved = {
    name for name, x in before.items() if not np.array_equal(x, after[name])
  }
  # The expert alone is trained.
  assert any(pi0_files.EXPERT in name for name in moved)
  assert not any(pi0_files.PALIGEMMA in name for name in moved)


@pytest.mark.claims
@needs_libero
def test_ppo_of_pi0_acts_in_libero_by_pictures_and_words(tmp_path):
  model = tmp_path / 'given'
  metrics = run(
    'gin_configs/ppo_pi0_libero.gin',
    [
      *small_pi0(model, 7, adaptive=False, Z=50, state=8),
      'instructions.pi0.length = 128',
      'STEPS = 1',
      'ENVIRONMENTS = 2',
      'EVAL_ENVIRONMENTS = 1',
      'PROCESSES = 1',
      'HORIZON = 10',
      'libero.env.image_size = 64',
      'libero.env.task_ids = (0,)',
      'seed_source.seeds.held_out = 1',
      'workflows.embodied_ppo.num_steps = 2',
      'workflows.embodied_ppo.num_minibatches = 1',
      # So that the step is seen in weights of float32.
      'actor/optimizers.adamw.learning_rate = 1e-2',
    ],
    tmp_path / 'run',
  )
  assert metrics['env/steps'] == 2 * 2 * 5 and not metrics.get('env/failed')
  assert np.isfinite(metrics['train/value_loss'])
  assert metrics['train/clip_fraction'] >= 0


@pytest.mark.skipif(
  importlib.util.find_spec('metaworld') is None,
  reason='Meta-World is not installed: pip install "rlinf-jax[metaworld]".',
)
def test_ppo_of_pi0_acts_in_tasks_of_meta_world_by_pictures_and_words(tmp_path):
  metrics = run(
    'gin_configs/ppo_pi0_metaworld.gin',
    [
      *small_pi0(tmp_path / 'given', 4, adaptive=False, Z=50),
      'STEPS = 1',
      'ENVIRONMENTS = 2',
      'EVAL_ENVIRONMENTS = 2',
      'PROCESSES = 1',
      'DESCRIPTIONS = {"reach-v3": "Reach a goal position"}',
      'metaworld.env.tasks = ("reach-v3", "door-open-v3")',
      'metaworld.env.image_size = 32',
      'metaworld.env.horizon = 10',
      'seed_source.seeds.held_out = 2',
      'workflows.embodied_ppo.num_steps = 2',
      'workflows.embodied_ppo.num_minibatches = 1',
    ],
    tmp_path / 'run',
  )
  assert metrics['env/steps'] == 2 * 2 * 5 and not metrics.get('env/failed')
  assert np.isfinite(metrics['train/value_loss'])
  assert {'eval/reach-v3/success_once', 'eval/door-open-v3/success_once'} <= {
    *metrics
  }
  # The folder tells LeRobot how this policy acts.
  lerobots = json.loads((tmp_path / 'run/model/config.json').read_text())
  assert [*lerobots['input_features']] == [
    'observation.images.front',
    'observation.state',
  ]
  assert lerobots['n_action_steps'] == lerobots['num_inference_steps'] == 5


@pytest.mark.parametrize('world', ['push', 'maniskill'])
def test_ppo_of_openvla_trains_adapters_and_exports_them_merged(
  world, tmp_path, monkeypatch
):
  actions, camera = 7, 'image/base_camera'
  if world == 'push':
    actions, camera = pictured_push.ACTIONS, 'image/table'
    pictured_push.replace_pools(monkeypatch)
  elif not pictures_of_maniskill():
    pytest.skip('ManiSkill is not installed, or has no Vulkan device.')
  model = tmp_path / 'given'
  tiny_vla.model(model, tasks=[LETTERS], actions=actions)
  metrics = run(
    'gin_configs/ppo_openvla_maniskill.gin',
    [
      f'MODEL = {str(model)!r}',
      f'CAMERA = {camera!r}',
      'STEPS = 2',
      'ENVIRONMENTS = 4',
      'PROCESSES = 1',
      'HORIZON = 4',
      'workflows.embodied_ppo.num_minibatches = 2',
      # No episode succeeds, so that advantages are zero.
      'workflows.embodied_ppo.entropy_coef = 0.01',
      'maniskill.env.image_size = 32',
      'instructions.openvla.length = 192',  # A token is a character.
    ],
    tmp_path / 'run',
  )
  assert metrics['env/steps'] == 4 * 4
  assert np.isfinite(metrics['train/value_loss'])
  before, after = (
    {
      name: x
      for path in folder.glob('*.safetensors')
      for name, x in files.load_file(path).items()
    }
    for folder in (model, tmp_path / 'run/model')
  )
  moved = {
    name for name, x in before.items() if not np.array_equal(x, after[name])
  }
  # The matrices that have adapters, in the language model.
  assert moved and all('language_model' in name for name in moved)
  assert any('q_proj' in name for name in moved)
  assert not any('embed' in name or 'norm' in name for name in moved)
