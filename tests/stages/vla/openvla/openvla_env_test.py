"""OpenVLA in the push world, with pictures."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stages
from stages import base, workflows
from stages.envs import action_chunks, episode_stats, push
from stages.models import transformer
from stages.models.vision import vit
from stages.vla import pictures
from stages.vla.openvla import openvla, openvla_env

TOWER = {'image_size': 8, 'patch_size': 4, 'D': 4, 'L': 2, 'H': 1, 'F': 4}
CONFIG = openvla.Config(
  vit.Config(has_class=True, registers=1, layer_scale=True, **TOWER),
  vit.Config(**TOWER),
  transformer.Config(
    V=32, D=8, L=1, H=1, K=1, W=8, F=8, qkv_bias=False, tie_embeddings=False
  ),
  padded=8,
  bins=16,
  pictures=pictures.Pictures(sizes=(8, 8)),
)
POLICY = functools.partial(
  openvla_env.policy, config=CONFIG, instruction=(1, 5, 3)
)


@pytest.mark.slow
def test_grpo_learns_from_log_probabilities_that_are_those_of_sampling():
  env = push.push(image_size=8, horizon=3)
  workflow = workflows.embodied_grpo(
    env,
    POLICY,
    optax.sgd(0.1),
    num_envs=4,
    group_size=2,
    num_minibatches=1,
    episode_reward=episode_stats.episode_return,
    normalize_obs=False,
  )
  state = workflow.init(jax.random.key(0))
  new, info = workflow.step(state, (), jax.random.key(1))
  ratio = info['train/ratio_max'].value()['']
  np.testing.assert_allclose(ratio, 1.0, atol=1e-5)
  moved = jax.tree.map(
    lambda a, b: bool((a != b).any()), state.actor.params, new.actor.params
  )
  assert moved['llama']['unembed_DV'] and moved['dino']['patch_DOUU']


@pytest.mark.slow
def test_only_training_sees_changed_pictures():
  env = push.push(image_size=8)
  seen = dataclasses.replace(CONFIG.pictures, crop=0.9)
  settings = {'config': dataclasses.replace(CONFIG, pictures=seen)}
  plain, own = (
    POLICY(env, critic=False, augment=augment, **settings)
    for augment in (False, True)
  )
  params = plain.init(jax.random.key(0))
  _, obs = env.init(jnp.arange(2))
  keys = jax.random.split(jax.random.key(1), 2)
  losses = jax.jit(
    lambda params: [
      policy.imitation_loss(params, obs, jnp.zeros((2, 2)), keys, train=train)
      for policy, train in ((plain, True), (own, False), (own, True))
    ]
  )
  want, scored, trained = losses(params)
  np.testing.assert_array_equal(want, scored)
  assert (np.abs(trained - want) > 1e-5).all()
  with pytest.raises(ValueError, match='set center_crop = True, or augment'):
    POLICY(env, augment=True)


@pytest.mark.slow
def test_ppo_learns_with_the_value_of_the_same_model():
  env = push.push(image_size=8, horizon=3)
  workflow = workflows.embodied_ppo(
    env,
    POLICY,
    optax.sgd(0.1),
    num_envs=4,
    num_steps=4,
    num_minibatches=1,
    num_epochs=1,
    normalize_obs=False,
  )
  state = workflow.init(jax.random.key(0))
  new, info = workflow.step(state, (), jax.random.key(1))
  ratio = info['train/ratio_max'].value()['']
  np.testing.assert_allclose(ratio, 1.0, atol=1e-5)
  critic = new.actor.params[base.CRITIC]['value_D']
  assert jnp.isfinite(critic).all() and (critic != 0).any()


@pytest.mark.slow
def test_cloning_makes_demonstrated_actions_likely():
  env = push.push(image_size=8, horizon=3)
  workflow = workflows.behavior_cloning(
    env, POLICY, optax.adam(1e-2), normalize_obs=False
  )
  _, obs = env.init(jnp.arange(4))
  action = jnp.array([[-1.0, 0.2], [0.9, 0.1], [0.0, -0.7], [0.4, 0.4]])
  state = workflow.init(jax.random.key(0))
  losses = []
  for i in range(20):
    batch = base.Demonstration(obs, action)
    state, info = workflow.step(state, batch, jax.random.key(i))
    losses.append(float(info['train/loss'].value()['']))
  np.testing.assert_allclose(losses[0], 2 * np.log(16), atol=0.3)
  assert losses[-1] < 0.7 * losses[0]
  policy = POLICY(env)
  values = policy.value(
    state.actor.params, jax.tree.map(lambda x: x[None], obs)
  )
  assert values.shape == (1, 4)


def test_a_chunk_is_written_as_tokens_and_decoded_as_actions():
  env = push.push(image_size=8, horizon=4)
  policy = POLICY(env, chunk=2)
  demonstrated = jnp.array(
    [[[-0.9, 0.2], [0.5, 0.0]], [[0.1, 1.0], [0.3, -0.6]]]
  )
  _, obs = env.init(jnp.arange(2))
  params, keys = (
    policy.init(jax.random.key(0)),
    stages.keys(jax.random.key(1), jnp.arange(2)),
  )
  x = jax.jit(policy.act)(params, obs, keys)
  assert x.action.shape == (2, 4)
  now = jax.jit(policy.evaluate)(params, obs, x.action)
  np.testing.assert_allclose(now.logp, x.logp, atol=1e-5)
  token_BA = CONFIG.tokens.encode(demonstrated.reshape(2, 4))
  decoded = policy.to_env_action(token_BA)
  np.testing.assert_allclose(decoded, demonstrated, atol=1 / 15)
  loss = policy.imitation_loss(params, obs, demonstrated, keys)
  want = -policy.evaluate(params, obs, token_BA).logp
  np.testing.assert_allclose(loss, want, rtol=1e-6)
  with pytest.raises(ValueError, match='chunks of 2 .* has 1: record'):
    policy.imitation_loss(params, obs, demonstrated[:, 0], keys)
  with pytest.raises(ValueError, match='4 actions were given .* chunks of 2'):
    chunked = action_chunks.chunked(env, 2, 0.9)
    chunked.step(
      None, POLICY(env, chunk=4).to_env_action(jnp.zeros((2, 8), int))
    )


def test_an_environment_without_such_a_picture_is_refused():
  with pytest.raises(ValueError, match="reads the picture 'image/table'"):
    POLICY(push.push())
  with pytest.raises(
    ValueError, match=r"'image/wrist'.*\['image/table', 'stat"
  ):
    POLICY(push.push(image_size=8), camera='image/wrist')


def test_a_checkpoint_decides_no_chunk():
  env = push.push(image_size=8)
  with pytest.raises(ValueError, match='chunk is 2, and a checkpoint of OpenV'):
    openvla_env.pretrained(env, checkpoint='', instruction=(1, 5, 3), chunk=2)
