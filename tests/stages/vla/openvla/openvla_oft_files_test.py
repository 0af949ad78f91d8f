"""Published checkpoints of OpenVLA-OFT: a folder of the published layout."""

import collections
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as st

from stages import base
from stages.models.files import torch_file, weights
from stages.vla.openvla import (
  openvla_oft,
  openvla_oft_files,
  tuning_files,
)
from tests.stages.vla.openvla import openvla_files_test as plain

torch = pytest.importorskip('torch', reason='torch writes the heads.')

A, O, D, Z = 3, 5, 12, 2
BLOCK = 'model.mlp_resnet_blocks'
PROJECTOR, HEAD = (
  f'{stem}--150000_checkpoint.pt' for stem in tuning_files.FILES.values()
)
SHAPES = {
  PROJECTOR: {'fc1': (D, O), 'fc2': (D, D)},
  HEAD: {
    'model.layer_norm1': (A * D,),
    'model.fc1': (D, A * D),
    f'{BLOCK}.0.ffn.0': (D,),
    f'{BLOCK}.0.ffn.1': (D, D),
    f'{BLOCK}.1.ffn.0': (D,),
    f'{BLOCK}.1.ffn.1': (D, D),
    'model.layer_norm2': (D,),
    'model.fc2': (A, D),
  },
}
STATISTICS = {
  'libero': {
    'action': plain.BRIDGE,
    'proprio': {'q01': [-2.0] * O, 'q99': [2.0] * O},
  }
}


def state_dict(shapes):
  """A state as torch's parallel training saves it, in bfloat16."""
  found = collections.OrderedDict()
  # As the states of torch's modules have it.
  found._metadata = collections.OrderedDict({'': {'version': 1}})
  for name, shape in shapes.items():
    for suffix, size in (('weight', shape), ('bias', shape[:1])):
      x = 0.3 * torch.randn(size)
      found[f'module.{name}.{suffix}'] = x.to(torch.bfloat16)
  return found


def published(path):
  """Writes a folder of the published layout, and returns its path."""
  rng = np.random.default_rng(0)
  tensors = {
    name: (0.3 * rng.normal(size=shape)).astype(ml_dtypes.bfloat16)
    for name, shape in plain.shapes().items()
  }
  plain.write(path, tensors)
  (path / tuning_files.STATISTICS).write_text(json.dumps(STATISTICS))
  torch.manual_seed(0)
  for name, shapes in SHAPES.items():
    torch.save(state_dict(shapes), path / name)
  return path


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return published(tmp_path_factory.mktemp('oft'))


def policy(folder, **settings):
  return openvla_oft_files.policy(
    str(folder),
    chunk=Z,
    cameras=2,
    towers=plain.TOWERS,
    dtype='float32',
    **settings,
  )


def observation(state):
  image = jnp.full((2, 9, 7, 3), 80, jnp.uint8)
  prompt = base.Prompt(jnp.full((2, 3), 5), jnp.ones((2, 3), jnp.int32))
  return openvla_oft.Observation((image, 255 - image), prompt, state)


def test_a_published_folder_acts_and_is_exported_byte_for_byte(
  folder, tmp_path
):
  own = policy(folder)
  params = own.init(jax.random.key(0))
  act, keys = jax.jit(own.act), jax.random.split(jax.random.key(1), 2)
  inside, outside = (
    act(params, observation(jnp.full((2, O), x)), keys).action
    for x in (1.0, 9.0)
  )
  far = act(params, observation(jnp.full((2, O), 90.0)), keys).action
  assert own.to_env_action(inside).shape == (2, Z, A)
  assert (inside != outside).any()
  np.testing.assert_array_equal(outside, far)  # The state is clipped.

  out = tmp_path / 'exported'
  openvla_oft_files.export(out, params, folder, towers=plain.TOWERS)
  for suffix in '.safetensors', '.pt':
    want, got = (tensors(x, suffix) for x in (folder, out))
    assert got.keys() == want.keys() and want
    for name, tensor in want.items():
      assert got[name].shape == tensor.shape
      assert got[name].tobytes() == tensor.tobytes(), name
  # torch itself reads the heads.
  for name in SHAPES:
    want, got = (torch.load(x / name) for x in (folder, out))
    assert [*got] == [*want]
    assert all(torch.equal(got[key], want[key]) for key in want)


def tensors(folder, suffix):
  read = st.load_file if suffix == '.safetensors' else torch_file.read
  found = {}
  for path in folder.glob(f'*{suffix}'):
    found |= read(path)
  return found


def test_tokens_are_written_where_the_regression_head_is_left_aside(folder):
  own = policy(folder, head='token', critic=False)
  params = own.init(jax.random.key(0))
  assert 'l1_head' not in params and 'state_projector' in params
  config, _ = openvla_oft_files.read(folder, towers=plain.TOWERS)
  assert (config.head, config.O, config.A, config.Z) == ('l1', O, A, 8)


@pytest.mark.parametrize(
  'file', [PROJECTOR, HEAD, 'vision_backbone--7_checkpoint.pt']
)
def test_an_openvla_oft_is_refused_by_name_where_openvla_is_expected(
  file, tmp_path
):
  config = json.dumps(plain.CONFIG)
  (tmp_path / 'config.json').write_text(config)
  (tmp_path / file).touch()
  with pytest.raises(weights.CheckpointError) as error:
    plain.policy(tmp_path)
  assert str(error.value) == (
    f'{tmp_path} holds an OpenVLA-OFT, by its {file}, and an OpenVLA is '
    'expected, which has neither FiLM nor heads: read it by '
    '`openvla_oft_env.pretrained`, or give the folder of an OpenVLA.'
  )


def test_one_error_names_every_tensor_of_a_head_that_does_not_fit(
  folder, tmp_path
):
  copy = tmp_path / 'copy'
  copy.mkdir()
  for path in folder.iterdir():
    (copy / path.name).write_bytes(path.read_bytes())
  state = torch.load(copy / HEAD)
  state['module.stray'] = state.pop('module.model.fc1.bias')
  state['module.model.fc2.weight'] = torch.zeros(A + 1, D)
  torch.save(state, copy / HEAD)
  with pytest.raises(weights.CheckpointError) as error:
    policy(copy).init(jax.random.key(0))
  for part in (
    'actions have 3 numbers',
    'missing model.fc1.bias',
    'extra stray',
    'model.fc2.weight is [4, 12], expected [3, 12]',
  ):
    assert part in str(error.value)
  torch.save(state, copy / 'action_head--7_checkpoint.pt')
  with pytest.raises(weights.CheckpointError, match='several files action_hea'):
    policy(copy)


def test_a_state_that_is_normalized_here_must_come_in_its_own_units(folder):
  assert policy(folder).needs_raw_obs


def test_what_is_not_a_file_of_tensors_is_refused(folder, tmp_path):
  class Program:
    def __reduce__(self):
      return print, ('It ran.',)

  path = tmp_path / 'head.pt'
  for content in {'a': Program()}, [1, 2]:
    torch.save(content, path)
    with pytest.raises(weights.CheckpointError, match='not a file of tensors'):
      torch_file.read(path)
  path.write_bytes(b'no archive')
  with pytest.raises(weights.CheckpointError, match='not a file of tensors'):
    torch_file.read(path)


def test_statistics_of_the_state_must_be_there(folder, tmp_path):
  copy = tmp_path / 'copy'
  copy.mkdir()
  for path in folder.iterdir():
    (copy / path.name).write_bytes(path.read_bytes())
  lacking = {'libero': {'action': plain.BRIDGE}}
  (copy / tuning_files.STATISTICS).write_text(json.dumps(lacking))
  with pytest.raises(ValueError, match='need `proprio` with `q01`'):
    policy(copy)
