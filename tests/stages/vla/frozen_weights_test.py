"""Weights of VLAs that are not trained are held as their models round them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as st

from stages import base
from stages.envs import action_chunks, push
from stages.models import lora as lora_lib
from stages.vla.openvla import openvla_env, openvla_oft, openvla_oft_env
from stages.vla.pi0 import pi0_policy
from tests.stages.vla.openvla import openvla_env_test
from tests.stages.vla.openvla import openvla_files_test as openvla_files
from tests.stages.vla.pi0 import pi0_policy_test

B, CHUNK = 2, 2
LORA = lora_lib.Lora(rank=2)
VISION, ALL = ('vision',), ('vision', 'projector', 'language')
KEY = jax.random.key(0)
# Parameters besides biases and scales that are added to activations.
ADDED = {'position_PD', 'class_ID', 'register_GD'}


def narrow(config, *parts):
  """A model whose parts compute in bfloat16."""
  own = {k: getattr(config, k) for k in parts}
  own = {k: dataclasses.replace(x, dtype='bfloat16') for k, x in own.items()}
  return dataclasses.replace(config, **own)


OPENVLA = narrow(openvla_env_test.CONFIG, 'dino', 'siglip', 'llama')


def openvla(**trained):
  env = push.push(image_size=8)
  settings = {'config': OPENVLA, 'instruction': (1, 5, 3), 'critic': False}
  return env, openvla_env.policy(env, **settings, **trained), 1


def openvla_oft_policy(**trained):
  env = push.push(image_size=8)
  chunked = action_chunks.chunked(env, CHUNK, 1.0)
  own = openvla_oft_env.policy(
    chunked,
    config=openvla_oft.Config(OPENVLA, Z=CHUNK, A=2),
    instruction=(1, 5, 3),
    critic=False,
    **trained,
  )
  return env, own, CHUNK


def pi0(adaptive, **settings):
  config = pi0_policy_test.config(adaptive)
  own = pi0_policy.policy(
    pi0_policy_test.ENV,
    narrow(config, 'vision', 'trunk', 'expert'),
    instruction=(2, 7, 5),
    ignored=('state',) if adaptive else (),
    critic=False,
    **settings,
  )
  return pi0_policy_test.ENV, own, CHUNK


CASES = {
  'openvla': functools.partial(openvla, lora=LORA),
  'openvla_oft': functools.partial(openvla_oft_policy, lora=LORA),
  'openvla_oft_vision': functools.partial(openvla_oft_policy, frozen=VISION),
  'pi0_lora': functools.partial(pi0, False, lora=LORA),
  'pi05_expert': functools.partial(pi0, True, frozen=ALL),
}


def is_kept(path):
  """Whether a parameter is used in float32, by its path."""
  name = path[-1].key
  letters = name.rsplit('_', 1)[-1]
  is_vector = 'bias' in name or len(letters) == 1
  return is_vector or name in ADDED or name == lora_lib.ALPHA


@pytest.mark.parametrize('case', CASES)
def test_frozen_weights_are_rounded_and_change_no_bit(case):
  env, own, Z = CASES[case]()
  params = own.init(KEY)
  leaves = jax.tree_util.tree_leaves_with_path(params[base.FROZEN])
  for path, leaf in leaves:
    want = jnp.float32 if is_kept(path) else jnp.bfloat16
    assert leaf.dtype == want, jax.tree_util.keystr(path)
  trained = {k: x for k, x in params.items() if k != base.FROZEN}
  assert {x.dtype for x in jax.tree.leaves(trained)} == {np.dtype('float32')}

  _, obs = env.init(jnp.arange(B))
  action = jax.random.uniform(jax.random.key(2), (B, Z, 2), minval=-1)
  loss = jax.jit(
    lambda params: own.imitation_loss(
      params, obs, action, jax.random.split(KEY, B)
    )
  )
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  np.testing.assert_array_equal(loss(params), loss(wide))


def oft_with_all_heads():
  env = push.push(image_size=8)
  config = openvla_oft.Config(OPENVLA, Z=CHUNK, A=2, O=2, head='l1', film=True)
  own = openvla_oft_env.policy(
    action_chunks.chunked(env, CHUNK, 1.0),
    config=config,
    instruction=(1, 5, 3),
    state='state',
    critic=False,
  )
  return env, own, CHUNK


@pytest.mark.parametrize(
  'make, kept',
  [
    (oft_with_all_heads, ()),
    (
      functools.partial(pi0, True),
      ('action_in', 'action_out', 'time_in', 'time_out', 'norm_', 'attention_')
      + ('feedforward_',),
    ),
  ],
  ids=['openvla_oft', 'pi05'],
)
def test_all_that_a_policy_rounds_changes_no_bit(make, kept):
  env, own, Z = make()
  params = own.init(KEY)
  # FiLM starts at zero.
  params |= {
    k: jax.tree.map(
      lambda x: x + 0.1 * jax.random.normal(KEY, x.shape), params[k]
    )
    for k in {'film'} & {*params}
  }
  rounded = own.round_params(params)
  for path, leaf in jax.tree_util.tree_leaves_with_path(rounded):
    stays = is_kept(path) or any(name in path[-1].key for name in kept)
    want = jnp.float32 if stays else jnp.bfloat16
    assert leaf.dtype == want, jax.tree_util.keystr(path)
  _, obs = env.init(jnp.arange(B))
  action = jax.random.uniform(jax.random.key(2), (B, Z, 2), minval=-1)
  keys = jax.random.split(KEY, B)
  run = jax.jit(
    lambda params: (
      own.act(params, obs, keys).action,
      own.imitation_loss(params, obs, action, keys),
    )
  )
  jax.tree.map(np.testing.assert_array_equal, run(params), run(rounded))


def test_actions_of_merged_weights_change_no_bit():
  env, own, _ = openvla_oft_policy(lora=LORA)
  params = own.init(KEY)
  # B starts at zero: draw one that changes the model.
  params[lora_lib.ADAPTER] = jax.tree.map(
    lambda x: x + 0.1 * jax.random.normal(jax.random.key(2), x.shape),
    params[lora_lib.ADAPTER],
  )
  _, obs = env.init(jnp.arange(B))
  act = jax.jit(own.act)
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  got, want = (act(p, obs, jax.random.split(KEY, B)) for p in (params, wide))
  np.testing.assert_array_equal(got.action, want.action)
  np.testing.assert_array_equal(got.logp, want.logp)


@pytest.mark.parametrize('trained', [{'lora': LORA}, {'frozen': VISION}])
def test_a_folder_in_bfloat16_is_exported_byte_for_byte(tmp_path, trained):
  rng = np.random.default_rng(0)
  tensors = {
    name: (0.3 * rng.normal(size=shape)).astype(jnp.bfloat16)
    for name, shape in openvla_files.shapes().items()
  }
  folder = openvla_files.write(tmp_path / 'published', tensors)
  own = openvla_oft_env.pretrained(
    None,
    checkpoint=str(folder),
    **trained,
    data_set='bridge_orig',
    towers=openvla_files.TOWERS,
    critic=False,
  )
  params = own.init(KEY)
  frozen = params[base.FROZEN]
  dino = frozen.get(lora_lib.PARAMS, frozen)['dino']
  assert dino['patch_DOUU'].dtype == jnp.bfloat16
  # An adapter is zero, so what is exported is what was read.
  out = tmp_path / 'exported'
  openvla_oft_env.export(
    out,
    {'policy': params},
    checkpoint=str(folder),
    towers=openvla_files.TOWERS,
  )
  got = {}
  for path in out.glob('*.safetensors'):
    got |= st.load_file(path)
  assert got.keys() == tensors.keys()
  for name, tensor in tensors.items():
    assert got[name].dtype == tensor.dtype
    assert got[name].tobytes() == tensor.tobytes(), name
