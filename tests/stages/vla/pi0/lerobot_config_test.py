"""Folders that LeRobot opens: config.json, and how LeRobot then acts."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import lerobot_models
from stages import base
from stages.language import tokens
from stages.vla import instructions, normalization
from stages.vla.pi0 import lerobot_config, pi0, pi0_files, pi0_policy
from tests.stages.vla import instructions_test
from tests.stages.vla.pi0 import lerobot_test
from tests.stages.vla.pi0 import pi0_policy_test as plain

CAMERAS = 'image/wrist', 'image/top'
B, WIDTHS = 2, {'state': 5, 'actions': 3}  # Fewer than the model has room for.
STATS = {
  part: {
    'mean': np.linspace(-0.5, 0.5, n).tolist(),
    'std': np.linspace(0.5, 2.0, n).tolist(),
    'q01': np.linspace(-2.0, -1.0, n).tolist(),
    'q99': np.linspace(1.0, 2.5, n).tolist(),
  }
  for part, n in WIDTHS.items()
}
both = pytest.mark.parametrize('adaptive', [False, True], ids=['pi0', 'pi05'])


def exported(folder, adaptive, config=None, **kwargs):
  """Parameters, with none at its initial value, and their exported folder."""
  config = config or plain.config(adaptive)
  start = pi0.init_params(config, jax.random.key(0))
  leaves, tree = jax.tree.flatten(start)
  rng = np.random.default_rng(0)
  params = tree.unflatten(
    x + 0.05 * rng.normal(size=x.shape).astype(np.float32) for x in leaves
  )
  settings = {'norm_stats': STATS, 'cameras': CAMERAS, 'executed': 2}
  pi0_policy.export(
    folder, {'policy': params}, config=config, **settings | kwargs
  )
  return params


@both
def test_config_json_has_lerobots_names_and_the_values_of_the_policy(
  adaptive, tmp_path
):
  kwargs = {'num_steps': 5, 'relative_actions': (True, False, True)}
  exported(tmp_path, adaptive, **kwargs)
  found = json.loads((tmp_path / 'config.json').read_text())
  image = {'type': 'VISUAL', 'shape': [3, plain.SIZE, plain.SIZE]}
  features = found['input_features']
  assert [*features] == [
    'observation.images.wrist',
    'observation.images.top',
    'observation.state',
  ]
  assert features['observation.images.top'] == image
  assert features['observation.state'] == {'type': 'STATE', 'shape': [5]}
  assert found['output_features'] == {
    'action': {'type': 'ACTION', 'shape': [3]}
  }
  mode = 'QUANTILES' if adaptive else 'MEAN_STD'
  for key, want in {
    'type': 'pi05' if adaptive else 'pi0',
    'normalization_mapping': {
      'VISUAL': 'IDENTITY',
      'STATE': mode,
      'ACTION': mode,
    },
    'chunk_size': plain.CHUNK,
    'n_action_steps': 2,
    'num_inference_steps': 5,
    'max_state_dim': 4,
    'max_action_dim': 3,
    'tokenizer_max_length': 200 if adaptive else 48,
    'use_relative_actions': True,
    'relative_exclude_joints': ['001'],
    'action_feature_names': ['000', '001', '002'],
  }.items():
    assert found[key] == want, key


def test_lerobots_names_of_sizes_are_those_of_the_published_ones():
  names = lerobot_config.variants(pi0.published(dtype='bfloat16'))
  assert [*names.values()] == ['gemma_2b', 'gemma_300m']
  names = lerobot_config.variants(plain.config())
  trunk, expert = names.values()
  assert trunk.startswith('gemma_2b with other sizes: V 16, D 16, ')
  assert 'vision D 8, ' in trunk
  assert expert.startswith('gemma_300m with other sizes: D 12, ')


def test_each_camera_is_a_feature_of_its_own():
  names = 'image', 'image/top', 'image/left/wrist', 'head'
  assert [*map(lerobot_config.feature, names)] == [
    'observation.image',
    'observation.images.top',
    'observation.images.left.wrist',
    'observation.images.head',
  ]


@pytest.mark.parametrize(
  'kwargs',
  [
    {'cameras': None},
    {'norm_stats': None},
    {'norm_stats': {'actions': STATS['actions']}},
  ],
  ids=['cameras', 'statistics', 'state'],
)
def test_without_what_lerobot_reads_there_is_no_config_json(kwargs, tmp_path):
  exported(tmp_path, False, **kwargs)
  assert (tmp_path / 'model.safetensors').is_file()
  assert not (tmp_path / 'config.json').exists()


@both
def test_weights_are_one_file_with_all_that_lerobot_loads(adaptive, tmp_path):
  params = exported(tmp_path, adaptive)
  stored = load_file(tmp_path / 'model.safetensors')
  root = 'model.paligemma_with_expert.'
  trunk = stored[f'{root}paligemma.lm_head.weight']
  np.testing.assert_array_equal(trunk, params['trunk']['embed_VD'])
  head = stored[f'{root}gemma_expert.lm_head.weight']
  assert head.shape == (16, 12) and not head.any()
  read = pi0_files.read(tmp_path, plain.config(adaptive))
  jax.tree.map(np.testing.assert_array_equal, read, params)


def test_a_tokenizer_beside_config_json_is_found(tmp_path):
  exported(tmp_path, False)
  instructions_test.gemma(tmp_path, split_digits=True)
  tokenizer = tokens.load_tokenizer(str(tmp_path))
  assert tokenizer.bos_token == '<bos>'


def observed(rng, edge):
  pictures = rng.integers(0, 256, (2, B, edge, edge, 3), np.uint8)
  state = rng.uniform(-1.5, 1.5, (B, WIDTHS['state'])).astype(np.float32)
  return dict(zip(('wrist', 'top'), pictures, strict=True)), state


@pytest.mark.skipif(
  not lerobot_models.HAS_LEROBOT, reason=lerobot_models.REASON
)
@pytest.mark.parametrize('relative', [None, (True, False, True)])
@both
def test_a_folder_opens_in_lerobot_and_acts_the_same(
  adaptive, relative, tmp_path, capsys
):
  import torch

  config = lerobot_test.lerobot_config(adaptive)
  words = str(tmp_path / 'words')
  instructions_test.gemma(words, split_digits=True)
  folder = tmp_path / 'model'
  exported(folder, adaptive, config, relative_actions=relative)
  with pytest.raises(Exception, match='instantiate class PI0') as refused:
    lerobot_models.opened(folder, adaptive, words)
  assert 'Invalid paligemma_variant: gemma_2b wi' in str(
    refused.value.__cause__
  )
  path = folder / 'config.json'
  names = {
    'paligemma_variant': 'gemma_2b',
    'action_expert_variant': 'gemma_300m',
  }
  path.write_text(json.dumps(json.loads(path.read_text()) | names))
  theirs, before, after = lerobot_models.opened(folder, adaptive, words)
  assert 'All keys loaded successfully!' in capsys.readouterr().out
  own = pi0_policy.policy(
    None,
    config,
    state_tokens=instructions.state_tokens(words) if adaptive else None,
    checkpoint=str(folder),
    norm_stats=normalization.read(folder),
    cameras=CAMERAS,
    vectors=('state',),
    executed=2,
    critic=False,
  )
  image, state = observed(np.random.default_rng(1), lerobot_models.IMAGE)
  tasks = [instructions_test.TASK, 'put the towel']
  encode = instructions.pi05 if adaptive else instructions.pi0
  prompt = encode(tasks, checkpoint=words)
  obs = {'image': image, 'state': state, base.PROMPT: prompt._asdict()}
  obs = jax.tree.map(jnp.asarray, obs)
  action = own.act(
    own.init(jax.random.key(0)),
    obs,
    jax.random.split(jax.random.key(3), B),
    greedy=True,
  ).action
  batch = {
    f'observation.images.{key}': torch.tensor(np.moveaxis(x, -1, 1)) / 255.0
    for key, x in image.items()
  }
  batch |= {'observation.state': torch.tensor(state), 'task': tasks}
  noise = np.array(action.path[:, 0]).reshape(B, config.Z, config.A)
  chunk = theirs.predict_action_chunk(before(batch), noise=torch.tensor(noise))
  want = after(chunk)[:, : theirs.config.n_action_steps].numpy()
  got = np.asarray(own.to_env_action(action))
  assert got.shape == (B, 2, WIDTHS['actions'])
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
  print('largest difference', np.abs(got - want).max())
