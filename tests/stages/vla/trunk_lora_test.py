"""Fine-tuning of published folders: adapters, new heads, and their export."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import numpy as st

import stages
from stages import base, workflows
from stages.envs import action_chunks, episode_stats, push
from stages.models import lora as lora_lib
from stages.models.files import weights
from stages.vla import trunk_lora
from stages.vla.openvla import (
  openvla_env,
  openvla_oft,
  openvla_oft_env,
  tuning_files,
)
from tests.stages.vla.openvla import openvla_env_test
from tests.stages.vla.openvla import openvla_files_test as plain

A, O, Z = 2, 2, 2
STATS = {
  'push': {
    'action': {'q01': [-0.8, -0.5], 'q99': [0.9, 0.5]},
    'proprio': {'q01': [-1.0] * O, 'q99': [1.0] * O},
  }
}
LORA = lora_lib.Lora(rank=2)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A folder of OpenVLA in float32, without the heads of OpenVLA-OFT."""
  rng = np.random.default_rng(0)
  tensors = {
    name: (0.3 * rng.normal(size=shape)).astype(np.float32)
    for name, shape in plain.shapes().items()
  }
  text = plain.CONFIG['text_config'] | {'torch_dtype': 'float32'}
  return plain.write(
    tmp_path_factory.mktemp('published'),
    tensors,
    torch_dtype='float32',
    text_config=text,
  )


def pretrained(env, folder, **settings):
  return openvla_oft_env.pretrained(
    env,
    checkpoint=str(folder),
    instruction=(1, 5, 7),
    chunk=Z,
    towers=plain.TOWERS,
    **{'norm_stats': STATS, 'new_heads': True, 'critic': False} | settings,
  )


def demonstrations(rows=4):
  _, obs = push.push(image_size=8).init(jnp.arange(rows))
  action = jax.random.uniform(jax.random.key(3), (rows, Z, A), minval=-1)
  return base.Demonstration(obs, action)


def cloned(folder, steps, **settings):
  """The state after cloning without an environment, and its evaluations."""
  workflow = workflows.behavior_cloning(
    None,
    functools.partial(pretrained, folder=folder, **settings),
    optax.adam(1e-2),
    normalize_obs=False,
  )
  state, x = workflow.init(jax.random.key(0)), demonstrations()
  step, evaluate = jax.jit(workflow.step), jax.jit(workflow.evaluate)
  start, scores = state, []
  for i in range(steps):
    state, _ = step(state, x, jax.random.key(i))
  for now in start, state:
    scores.append(evaluate(now, x, jax.random.key(0)))
  assert workflow.score == 'eval/agreement'
  return workflow.params(start), workflow.params(state), scores


def read(info, name):
  return float(info[name].value()[''])


@pytest.mark.slow
def test_adapters_and_heads_learn_and_the_weights_stay(folder, tmp_path):
  start, end, scores = cloned(folder, 12, lora=LORA)
  assert read(scores[-1], 'eval/loss') < 0.9 * read(scores[0], 'eval/loss')
  # Z · A tokens: the geometric mean of their probabilities, over rows.
  loss = read(scores[0], 'eval/loss')
  assert 0 < read(scores[0], 'eval/agreement') < 1
  np.testing.assert_allclose(
    read(scores[0], 'eval/agreement'), np.exp(-loss / (Z * A)), rtol=0.2
  )
  before, after = start['policy'], end['policy']
  jax.tree.map(
    np.testing.assert_array_equal, before[base.FROZEN], after[base.FROZEN]
  )
  for part in lora_lib.ADAPTER, 'state_projector':
    moved = jax.tree.map(
      lambda a, b: bool((a != b).any()), before[part], after[part]
    )
    assert all(jax.tree.leaves(moved)), part

  # The exported policy acts as the trained one.
  out = tmp_path / 'tuned'
  openvla_oft_env.export(
    out, end, checkpoint=str(folder), norm_stats=STATS, towers=plain.TOWERS
  )
  assert json.loads((out / tuning_files.STATISTICS).read_text()) == STATS
  x, keys = demonstrations(), stages.keys(jax.random.key(1), jnp.arange(4))
  adapted = pretrained(None, folder, lora=LORA)
  reread = pretrained(None, out, norm_stats=None, new_heads=False)
  params = reread.init(jax.random.key(5))
  got = jax.jit(reread.act)(params, x.obs, keys)
  want = jax.jit(adapted.act)(after, x.obs, keys)
  np.testing.assert_array_equal(got.action, want.action)
  np.testing.assert_allclose(got.logp, want.logp, atol=1e-4)
  # Tensors beside the adapted matrices are those of the original.
  stored = [
    {k: v for p in f.glob('*.safetensors') for k, v in st.load_file(p).items()}
    for f in (folder, out)
  ]
  differ = {k for k, v in stored[0].items() if (v != stored[1][k]).any()}
  assert differ == {k for k in stored[0] if '_proj.' in k and 'language' in k}


def test_a_model_without_a_checkpoint_has_adapters_beside_its_weights():
  config = openvla_oft.Config(openvla_env_test.CONFIG, Z=Z, A=A)
  make = functools.partial(
    openvla_oft_env.policy,
    action_chunks.chunked(push.push(image_size=8), Z, 1.0),
    config=config,
    instruction=(1, 5, 3),
    critic=False,
  )
  key = jax.random.key(0)
  whole = jax.eval_shape(make().init, key)
  params = jax.eval_shape(make(lora=LORA).init, key)
  assert {*params} == {base.FROZEN, lora_lib.ADAPTER}
  assert params[base.FROZEN][lora_lib.PARAMS] == whole


@pytest.mark.slow
def test_log_probabilities_of_adapted_policies_are_those_of_sampling(folder):
  env = push.push(image_size=8)
  own = pretrained(env, folder, lora=LORA, critic=True)
  params = own.init(jax.random.key(0))
  # B starts at zero: draw one that changes the model.
  params[lora_lib.ADAPTER] = jax.tree.map(
    lambda x: x + 0.1 * jax.random.normal(jax.random.key(2), x.shape),
    params[lora_lib.ADAPTER],
  )
  _, obs = env.init(jnp.arange(4))
  keys = stages.keys(jax.random.key(1), jnp.arange(4))
  x = jax.jit(own.act)(params, obs, keys)
  prepared = own.prepare_act(params)
  assert not lora_lib.is_adapted(prepared)
  now = jax.jit(own.act)(prepared, obs, keys)
  np.testing.assert_allclose(now.logp, x.logp, atol=1e-5)
  now = jax.jit(own.evaluate)(params, obs, x.action)
  np.testing.assert_allclose(now.logp, x.logp, atol=1e-5)
  plain_policy = pretrained(env, folder, critic=True)
  merged = trunk_lora.merge(params, part=openvla_env.LLAMA)
  now = jax.jit(plain_policy.evaluate)(merged, obs, x.action)
  np.testing.assert_allclose(now.logp, x.logp, atol=1e-5)


@pytest.mark.slow
def test_grpo_goes_on_with_adapters_from_a_checkpoint(folder):
  env = push.push(image_size=8, horizon=4)
  workflow = workflows.embodied_grpo(
    action_chunks.chunked(env, Z, 0.97),
    functools.partial(pretrained, folder=folder, lora=LORA),
    optax.sgd(0.1),
    num_envs=4,
    group_size=2,
    num_minibatches=1,
    episode_reward=episode_stats.episode_return,
    normalize_obs=False,
  )
  state = workflow.init(jax.random.key(0))
  new, info = workflow.step(state, (), jax.random.key(1))
  np.testing.assert_allclose(read(info, 'train/ratio_max'), 1.0, atol=1e-5)
  before, after = state.actor.params, new.actor.params
  jax.tree.map(
    np.testing.assert_array_equal, before[base.FROZEN], after[base.FROZEN]
  )
  name = 'query_B_IHW'
  layers = [x[lora_lib.ADAPTER]['layers'][name] for x in (before, after)]
  assert (layers[0] != layers[1]).any()


@pytest.mark.slow
def test_all_weights_learn_without_adapters(folder):
  start, end, _ = cloned(folder, 2, head='l1', lora=lora_lib.Lora(rank=None))
  moved = jax.tree.map(
    lambda a, b: bool((a != b).any()), start['policy'], end['policy']
  )
  assert moved['llama']['layers']['query_DHW'] and moved['l1_head']['in_OD']
  assert moved['dino']['patch_DOUU'] and moved['projector']['in_OF']


def test_commands_are_those_of_the_data_within_the_bounds(folder):
  wide = {'push': {'action': {'q01': [-3.0, -0.5], 'q99': [3.0, 0.5]}}}
  env = push.push(image_size=8)
  own = pretrained(env, folder, norm_stats=wide, new_heads=False)
  token = jnp.array([[16, 16, 31, 31]])  # The highest bins, then the lowest.
  command = own.to_env_action(token)[0]
  np.testing.assert_allclose(command[:, 0], [1.0, -1.0])
  np.testing.assert_allclose(command[:, 1], [0.5, -0.5], atol=0.1)


def test_what_does_not_fit_is_refused(folder):
  env = push.push(image_size=8)
  with pytest.raises(weights.CheckpointError, match='missing action_head--ST'):
    own = pretrained(env, folder, head='l1', new_heads=False)
    own.init(jax.random.key(0))
  with pytest.raises(ValueError, match="reads the picture 'image/wrist'"):
    pretrained(env, folder, cameras=('image/table', 'image/wrist'))
  with pytest.raises(ValueError, match='takes actions of 2 numbers, and the m'):
    stats = {'arm': {'action': {'q01': [-1.0] * 7, 'q99': [1.0] * 7}}}
    pretrained(env, folder, norm_stats=stats)
  with pytest.raises(ValueError, match='chunks of 2 .* has 1: record'):
    own = pretrained(env, folder)
    x = demonstrations()
    own.imitation_loss(own.init(jax.random.key(0)), x.obs, x.action[:, 0], None)
  with pytest.raises(ValueError, match='Adapters of this model start anew'):
    trunk_lora.wrap(pretrained(env, folder), lora_lib.Lora(adapter='x'), (), '')
  with pytest.raises(ValueError, match='none is given: set normalize_obs'):
    workflows.behavior_cloning(
      None, functools.partial(pretrained, folder=folder), optax.sgd(0.1)
    )
