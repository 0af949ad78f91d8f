"""Statistics in LeRobot's processors, against what LeRobot computes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lerobot_models
from stages.models.files import weights
from stages.vla import lerobot_processors, normalization
from stages.vla.pi0 import pi0_files, pi0_policy
from tests.stages.vla.pi0 import pi0_policy_test as plain

# The last number never changes.
STATS = {
  'mean': [0.5, -2.0, 3.0],
  'std': [0.25, 1.5, 0.0],
  'min': [-3.0, -4.0, 3.0],
  'max': [4.0, 1.0, 3.0],
  'q01': [-1.0, -3.5, 3.0],
  'q99': [3.0, 0.5, 3.0],
  'q10': [-0.5, -3.0, 3.0],
  'q90': [2.0, 0.0, 3.0],
}
MODES = ['MEAN_STD', 'MIN_MAX', 'QUANTILES', 'QUANTILE10', 'IDENTITY']
FEATURES = {
  'observation.state': {'type': 'STATE', 'shape': [3]},
  'action': {'type': 'ACTION', 'shape': [3]},
}
X = np.array([[0.0, 3.0, 3.0], [4.0, -2.0, 3.0], [3.0, 1.0, 3.0]], np.float32)


def folder_of(path, mode, steps=(), stats=STATS):
  """A folder as LeRobot 0.6.1 writes it, with a mode for both parts."""
  tensors = {
    f'{name}.{key}': np.array(x, np.float32)
    for name in FEATURES
    for key, x in stats.items()
  }
  norm_map = {'VISUAL': 'IDENTITY', 'STATE': mode, 'ACTION': mode}
  config = {'eps': 1e-8, 'features': FEATURES, 'norm_map': norm_map}
  for name, step in (
    ('policy_preprocessor', 'normalizer_processor'),
    ('policy_postprocessor', 'unnormalizer_processor'),
  ):
    file = f'{name}_step_0_{step}.safetensors'
    entry = {'registry_name': step, 'config': config}
    if tensors:
      save_file(tensors, path / file)
      entry['state_file'] = file
    text = json.dumps({'name': name, 'steps': [entry, *steps]})
    (path / f'{name}.json').write_text(text)
  return path


def by_hand(mode, x):
  """LeRobot's equations, of numbers that change."""
  first, second = (
    np.array(STATS[k]) for k in normalization.MODES.get(mode, ('q01', 'q99'))
  )
  if mode == 'IDENTITY':
    return x
  if mode == 'MEAN_STD':
    return (x - first) / np.where(second > 0, second, np.inf)
  width = np.where(second > first, second - first, np.inf)
  return 2 * (x - first) / width - 1


@pytest.mark.parametrize('mode', MODES)
def test_the_mode_is_that_of_the_folder(mode, tmp_path):
  stats = normalization.read(folder_of(tmp_path, mode))
  for part in ('state', 'actions'):
    for quantiles in (False, True):  # Neither counts.
      own = normalization.of(stats, part, quantiles=quantiles)
      np.testing.assert_allclose(
        own.normalize(X), by_hand(mode, X), rtol=1e-5, atol=1e-5
      )
      back = own.unnormalize(own.normalize(X))
      np.testing.assert_allclose(back, X, atol=1e-5)


def test_a_folder_without_statistics_leaves_numbers_as_they_are(tmp_path):
  stats = normalization.read(folder_of(tmp_path, 'MEAN_STD', stats={}))
  own = normalization.of(stats, 'actions', quantiles=False)
  assert len(own.origin) == 3
  np.testing.assert_array_equal(own.normalize(X), X)


def test_damaged_processors_are_refused(tmp_path):
  folder = folder_of(tmp_path, 'MEAN_STD')
  (path,) = folder.glob('policy_pre*.safetensors')
  path.write_bytes(b'0')
  with pytest.raises(weights.CheckpointError, match='cannot be read'):
    normalization.read(folder)
  (folder / 'policy_preprocessor.json').write_text('[]')
  with pytest.raises(weights.CheckpointError, match="object with 'steps'"):
    normalization.read(folder)
  stats = {'actions': {'mode': 'ZSCORE', 'mean': [0.0], 'std': [1.0]}}
  with pytest.raises(ValueError, match="is 'ZSCORE', and these are known"):
    normalization.of(stats, 'actions', quantiles=False)


@pytest.mark.parametrize(
  'changed',
  [
    {'eps': None},
    {'norm_map': ['MEAN_STD']},
    {'features': ['action'], 'norm_map': {}},
    {'features': {'action': {}}, 'norm_map': {}},
    {'features': {'action': {'shape': 3}}, 'norm_map': {}},
  ],
)
def test_settings_of_another_kind_are_refused(changed, tmp_path):
  folder = folder_of(tmp_path, 'MEAN_STD')
  for path in folder.glob('policy_*.json'):
    raw = json.loads(path.read_text())
    raw['steps'][0]['config'] |= changed
    path.write_text(json.dumps(raw))
  with pytest.raises(weights.CheckpointError, match='settings .*copy it again'):
    normalization.read(folder)


@pytest.mark.parametrize('told', [True, 'yes', [True], [True] * 4, [1, 0, 1]])
def test_another_entry_of_relative_actions_is_refused(told, tmp_path):
  stats = {'state': STATS, 'actions': STATS | {'relative': told}}
  normalization.write(tmp_path, 'robot', stats)
  with pytest.raises(weights.CheckpointError, match='each of 3 numbers'):
    normalization.read(tmp_path)


def test_statistics_keep_the_epsilon_of_their_folder(tmp_path):
  stats = normalization.read(folder_of(tmp_path, 'MEAN_STD'))
  stats = {k: x | {'eps': 0.5} for k, x in stats.items()}
  (tmp_path / 'own').mkdir()
  lerobot_processors.write(tmp_path / 'own', stats, adaptive=False)
  assert normalization.read(tmp_path / 'own')['actions']['eps'] == 0.5


@pytest.mark.parametrize('adaptive', [False, True], ids=['pi0', 'pi05'])
def test_what_is_written_is_read(adaptive, tmp_path):
  part = {k: STATS[k] for k in ('mean', 'std', 'q01', 'q99')}
  mask = [True, False, True]
  stats = {'state': part, 'actions': part | {'relative': mask}}
  lerobot_processors.write(tmp_path, stats, adaptive=adaptive)
  found = normalization.read(tmp_path)
  assert found['actions']['relative'] == mask
  assert 'relative' not in found['state']
  for name in ('state', 'actions'):
    own, want = (
      normalization.of(x, name, quantiles=adaptive) for x in (found, stats)
    )
    # LeRobot widens a range by ε only where it is empty, openpi always.
    np.testing.assert_allclose(own.normalize(X), want.normalize(X), rtol=1e-4)
    np.testing.assert_allclose(own.unit, want.unit, rtol=1e-4)
  normalization.write(tmp_path, 'robot', stats)
  assert normalization.read(tmp_path) == stats
  # A mode is not openpi's: its file would be read in another one.
  normalization.write(tmp_path / 'other', 'robot', found)
  assert not (tmp_path / 'other').exists()


def test_statistics_among_the_weights_are_read_and_acted_by(tmp_path):
  """The layout of LeRobot before it had processors."""
  made = plain.policy(critic=False)
  params = made.init(plain.KEY)
  pi0_files.write(tmp_path, params, plain.config())
  path = tmp_path / 'model.safetensors'
  tensors = load_file(path)
  for owner, feature in (
    ('normalize_inputs', 'observation_state'),
    ('normalize_targets', 'action'),
    ('unnormalize_outputs', 'action'),
  ):
    for name in ('mean', 'std'):
      part = 'state' if owner == 'normalize_inputs' else 'actions'
      tensors[f'{owner}.buffer_{feature}.{name}'] = np.array(
        plain.STATS[part][name], np.float32
      )
  save_file(tensors, path)
  modes = {'STATE': 'MEAN_STD', 'ACTION': 'MEAN_STD'}
  for wrong in '[]', '{"normalization_mapping": ["MEAN_STD"]}':
    (tmp_path / 'config.json').write_text(wrong)
    with pytest.raises(weights.CheckpointError, match='config.json, that are'):
      normalization.read(tmp_path)
  text = json.dumps({'type': 'pi0', 'normalization_mapping': modes})
  (tmp_path / 'config.json').write_text(text)
  stats = normalization.read(tmp_path)
  own = plain.policy(checkpoint=str(tmp_path), norm_stats=stats, critic=False)
  want = plain.policy(norm_stats=plain.STATS, critic=False)
  _, obs = plain.ENV.init(jnp.arange(plain.B))
  keys = jax.random.split(jax.random.key(1), plain.B)
  moves = [
    policy.to_env_action(policy.act(weights, obs, keys).action)
    for policy, weights in ((own, own.init(plain.KEY)), (want, params))
  ]
  np.testing.assert_allclose(*moves, atol=1e-4)


def test_an_export_tells_which_actions_are_relative(tmp_path):
  params = {'policy': plain.policy(critic=False).init(plain.KEY)}
  pi0_policy.export(
    tmp_path,
    params,
    config=plain.config(),
    norm_stats=plain.STATS,
    relative_actions=True,
  )
  stats = normalization.read(tmp_path)
  assert stats['actions']['relative'] == [True, False]
  assert lerobot_processors.read(tmp_path)['actions']['relative'] == [
    True,
    False,
  ]
  text = next(tmp_path.glob('assets/*/norm_stats.json')).read_text()
  assert json.loads(text)['norm_stats'] == plain.STATS
  own = plain.policy(norm_stats=stats, critic=False)
  _, obs = plain.ENV.init(jnp.arange(1))
  x = own.act(params['policy'], obs, jax.random.split(plain.KEY, 1))
  np.testing.assert_allclose(x.action.offset[0, 0], obs['state'][0, 0])
  with pytest.raises(ValueError, match='relative by .*: leave it out'):
    plain.policy(norm_stats=stats, relative_actions=False)


lerobots = pytest.mark.skipif(
  not lerobot_models.HAS_LEROBOT, reason=lerobot_models.REASON
)


@lerobots
@pytest.mark.parametrize('mode', MODES)
def test_lerobots_own_steps_compute_the_same(mode, tmp_path):
  import torch

  normalizer, relative = lerobot_models.processors()
  theirs = normalizer.NormalizerProcessorStep(
    features=FEATURES,
    norm_map={'STATE': mode, 'ACTION': mode},
    stats={
      name: {k: np.array(x) for k, x in STATS.items()} for name in FEATURES
    },
  )
  step = relative.RelativeActionsProcessorStep(
    enabled=True, exclude_joints=['gripper'], action_names=['x', 'Gripper', 'z']
  )
  steps = [
    {
      'registry_name': 'relative_actions_processor',
      'config': step.get_config(),
    }
  ]
  folder = folder_of(tmp_path, mode, steps)
  # The file and its settings are as LeRobot's own step has them.
  (path,) = folder.glob('policy_pre*.safetensors')
  save_file({k: x.numpy() for k, x in theirs.state_dict().items()}, path)
  listed = json.loads((folder / 'policy_preprocessor.json').read_text())
  listed['steps'][0]['config'] = theirs.get_config()
  (folder / 'policy_preprocessor.json').write_text(json.dumps(listed))
  stats = normalization.read(folder)
  assert stats['actions']['relative'] == step._build_mask(3)
  for part, inverse in (
    ('state', False),
    ('actions', False),
    ('actions', True),
  ):
    own = normalization.of(stats, part, quantiles=False)
    x = torch.tensor(X)
    if part == 'state':
      key = 'observation.state'
      want = theirs._normalize_observation({key: x}, inverse=False)[key]
    else:
      want = theirs._normalize_action(x, inverse=inverse)
    got = own.unnormalize(X) if inverse else own.normalize(X)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=1e-5)


@lerobots
@pytest.mark.parametrize('adaptive', [False, True], ids=['pi0', 'pi05'])
def test_lerobots_own_steps_read_what_is_exported(adaptive, tmp_path):
  from safetensors import torch as torch_files
  import torch

  normalizer, relative = lerobot_models.processors()
  part = {k: STATS[k] for k in ('mean', 'std', 'q01', 'q99')}
  stats = {'state': part, 'actions': part | {'relative': [True, False, True]}}
  lerobot_processors.write(tmp_path, stats, adaptive=adaptive)
  kinds = {
    'normalizer_processor': normalizer.NormalizerProcessorStep,
    'unnormalizer_processor': normalizer.UnnormalizerProcessorStep,
    'relative_actions_processor': relative.RelativeActionsProcessorStep,
    'absolute_actions_processor': relative.AbsoluteActionsProcessorStep,
  }
  made = {}
  for name in ('policy_preprocessor', 'policy_postprocessor'):
    for entry in json.loads((tmp_path / f'{name}.json').read_text())['steps']:
      if entry['registry_name'] in kinds:
        step = kinds[entry['registry_name']](**entry['config'])
        if 'state_file' in entry:
          step.load_state_dict(
            torch_files.load_file(tmp_path / entry['state_file'])
          )
        made[entry['registry_name']] = step
  assert made['relative_actions_processor']._build_mask(3) == [
    True,
    False,
    True,
  ]
  assert made['absolute_actions_processor'].enabled
  x = torch.tensor(X)
  own = normalization.of(stats, 'actions', quantiles=adaptive)
  changes = [0, 1]  # LeRobot's and openpi's numbers for 0/0 differ.
  np.testing.assert_allclose(
    own.unnormalize(X),
    made['unnormalizer_processor']._normalize_action(x, inverse=True),
    atol=1e-4,
  )
  key = 'observation.state'
  seen = made['normalizer_processor']._normalize_observation(
    {key: x}, inverse=False
  )[key]
  own = normalization.of(stats, 'state', quantiles=adaptive)
  np.testing.assert_allclose(
    own.normalize(X)[:, changes], seen[:, changes], rtol=1e-4, atol=1e-5
  )
