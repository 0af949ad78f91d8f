"""π0 and π0.5 as policies in the pushing world, with pictures."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import base, workflows
from stages.envs import action_chunks, episode_stats, push
from stages.learn import optimizers
from stages.models import lora
from stages.models.control import flow_policy
from stages.models.vision import vit
from stages.vla import instructions, normalization, pictures
from stages.vla.pi0 import pi0, pi0_files, pi0_noise, pi0_policy
from tiny import read

SIZE, CHUNK, B = 16, 2, 4
ENV = action_chunks.chunked(push.push(horizon=4, image_size=SIZE), CHUNK, 0.9)
KEY = jax.random.key(0)
ALL = ('vision', 'projector', 'language')
STATS = {
  'state': {'mean': [0.3, -0.2], 'std': [0.5, 2.0]},
  'actions': {'mean': [0.1, 0.0], 'std': [0.4, 1.5]},
}
# Bin b is written as the token b mod 12, so that neighbors differ.
STATE_TOKENS = instructions.StateTokens(
  np.arange(257)[:, None] % 12, np.ones((257, 1), np.int32), np.array([13, 14])
)


def config(adaptive=False, **kwargs):
  sizes = {'L': 1, 'H': 2, 'K': 1, 'W': 8, 'F': 16, 'init_stddev': 0.3}
  return pi0.Config(
    vit.Config(image_size=SIZE, patch_size=8, D=8, L=1, H=2, F=8),
    pi0.GEMMA(V=16, D=16, **sizes),
    pi0.GEMMA(V=1, D=12, **sizes),
    **{'Z': CHUNK, 'A': 3, 'O': 4, 'adaptive': adaptive} | kwargs,
  )


def policy(env=ENV, adaptive=False, ignored=None, **kwargs):
  if ignored is None:
    ignored = ('state',) if adaptive else ()
  return pi0_policy.policy(
    env, config(adaptive), instruction=(2, 7, 5), ignored=ignored, **kwargs
  )


@functools.cache
def acted(adaptive):
  made = policy(adaptive=adaptive)
  params = made.init(KEY)
  _, obs = ENV.init(jnp.arange(B))
  keys = jax.random.split(jax.random.key(1), B)
  return made, params, keys, jax.jit(made.act)(params, obs, keys)


@pytest.mark.parametrize('adaptive', [False, True], ids=['pi0', 'pi05'])
def test_actions_are_scored_as_they_were_recorded(adaptive):
  made, params, _, x = acted(adaptive)
  assert x.action.path.shape == (B, 5, CHUNK * 3)
  now = jax.jit(made.evaluate)(params, x.obs, x.action)
  np.testing.assert_allclose(now.logp, x.logp, atol=1e-5)
  np.testing.assert_allclose(now.value, made.value(params, x.obs), atol=1e-6)


def test_flow_noise_scores_each_step_by_a_deviation_within_its_range():
  exploration = flow_policy.Exploration('noise', min_std=0.1, max_std=0.4)
  made = policy(adaptive=True, exploration=exploration)
  params = made.init(KEY)
  _, obs = ENV.init(jnp.arange(B))
  act, evaluate = jax.jit(made.act), jax.jit(made.evaluate)
  x = act(params, obs, jax.random.split(jax.random.key(1), B))
  now = evaluate(params, x.obs, x.action)
  np.testing.assert_allclose(now.logp, x.logp, atol=1e-5)
  grads = jax.grad(lambda p: evaluate(p, x.obs, x.action).entropy.sum())(params)
  assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads['spread']))
  # With outputs far from zero, deviations are at the ends of their range.
  numbers = CHUNK * 2  # Of three that the model writes, two are executed.
  of_one = lambda std: 0.5 * np.log(2 * np.pi * np.e * std**2)
  for bias, std in ((-9.0, 0.1), (9.0, 0.4)):
    own = params[pi0_noise.SPREAD] | {'out_bias_A': jnp.full(3, bias)}
    at_end = evaluate(params | {pi0_noise.SPREAD: own}, x.obs, x.action)
    want = numbers * (of_one(1.0) + 4 * of_one(std))
    np.testing.assert_allclose(at_end.entropy, want, rtol=1e-4)


def test_numbers_that_the_environment_does_not_take_have_no_probability():
  made, params, _, x = acted(False)
  index = int(x.action.stochastic[0, 0]) + 1
  by_width = x.action.path.reshape(B, 5, CHUNK, 3)

  evaluate = jax.jit(made.evaluate)

  def scored(number):
    path = by_width.at[0, index, :, number].add(0.1).reshape(B, 5, -1)
    action = x.action._replace(path=path)
    return float(evaluate(params, x.obs, action).logp[0])

  assert scored(2) == pytest.approx(float(x.logp[0]), abs=1e-5)
  assert abs(scored(1) - float(x.logp[0])) > 1e-3
  env_action = made.to_env_action(x.action)
  np.testing.assert_array_equal(
    env_action, np.clip(by_width[:, -1, :, :2], -1, 1)
  )


def test_a_row_acts_by_its_key_and_its_picture():
  made, params, keys, x = acted(False)
  some = slice(1, 3)
  act = jax.jit(made.act)
  few = act(params, jax.tree.map(lambda x: x[some], x.obs), keys[some])
  np.testing.assert_allclose(few.action.path, x.action.path[some], atol=1e-5)
  dark = jax.tree.map(lambda x: 0 * x if x.dtype == jnp.uint8 else x, x.obs)
  other = act(params, dark, keys)
  moved = np.abs(other.action.path[:, -1] - x.action.path[:, -1]).max(1)
  assert (moved > 1e-4).all()


def test_only_the_expert_and_the_critic_learn_if_so_wished(tmp_path):
  make = functools.partial(policy, frozen=ALL)
  workflow = workflows.embodied_grpo(
    ENV,
    make,
    optimizers.adamw(1e-2),
    num_envs=4,
    group_size=2,
    num_steps=2,
    episode_reward=episode_stats.episode_return,
  )
  before = workflow.init(KEY)
  after, info = workflow.step(before, (), KEY)
  assert np.isfinite(read(info)['train/policy_loss'])
  old, new = before.actor.params, after.actor.params
  same = lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)
  same(old[base.FROZEN], new[base.FROZEN])
  with pytest.raises(AssertionError):
    same(old['expert'], new['expert'])
  # A checkpoint is what a policy starts from.
  full = old[base.FROZEN] | {'expert': new['expert']}
  pi0_files.write(tmp_path, full, config())
  same(policy(checkpoint=str(tmp_path), critic=False).init(KEY), full)


@pytest.mark.parametrize(
  ('adaptive', 'layout'),
  [
    (False, pi0_files.Layout('', '', pi0_files.EMBEDDINGS[1])),
    (True, pi0_files.Layout()),
  ],
  ids=['pi0_openpi', 'pi05_lerobot'],
)
def test_a_published_layout_acts_and_is_written_as_it_was(
  adaptive, layout, tmp_path
):
  own, first, second = config(adaptive), tmp_path / 'one', tmp_path / 'two'
  params = policy(adaptive=adaptive, critic=False).init(KEY)
  pi0_files.write(first, params, own, layout=layout)
  quantiles = {'q01': [-0.5, -2.0], 'q99': [0.75, 2.0]}
  actions = quantiles if adaptive else STATS['actions']
  normalization.write(first, 'robot', STATS | {'actions': actions})
  made = policy(
    adaptive=adaptive,
    critic=False,
    checkpoint=str(first),
    norm_stats=normalization.read(first),
  )
  start = made.init(KEY)
  _, obs = ENV.init(jnp.arange(B))
  keys = jax.random.split(jax.random.key(1), B)
  act, moves = jax.jit(made.act), []
  for seen in (start, params):
    x = act(seen, obs, keys)
    assert np.isfinite(x.logp).all()
    moves.append(np.asarray(made.to_env_action(x.action)))
  assert moves[0].shape == (B, CHUNK, 2) and np.abs(moves[0]).max() <= 1
  assert len(np.unique(moves[0])) > B  # Rows and numbers differ.
  np.testing.assert_array_equal(*moves)
  pi0_files.write(second, start, own, layout=pi0_files.layout_of(first))
  name = 'model.safetensors'
  assert (first / name).read_bytes() == (second / name).read_bytes()


def test_what_the_model_does_not_fit_is_refused():
  wide = ENV._replace(action_low=(0.0,) * 4, action_high=(1.0,) * 4)
  for env, message in (
    (push.push(), 'π0 reads images, and'),
    (wide, 'actions have 4.*room for 3: make A'),
  ):
    with pytest.raises(ValueError, match=message):
      policy(env)
  with pytest.raises(ValueError, match='π0.5 reads the state in its instr'):
    policy(adaptive=True, ignored=())
  with pytest.raises(ValueError, match='`state_tokens` are of π0.5: leave'):
    policy(state_tokens=STATE_TOKENS)
  with pytest.raises(ValueError, match='with adapters .*leave out `frozen`'):
    policy(frozen=ALL, lora=lora.Lora(rank=2))
  with pytest.raises(ValueError, match='3 actions are to be executed, and a'):
    policy(executed=3)
  with pytest.raises(ValueError, match="images .*'image/wrist' is named"):
    policy(cameras=('image/wrist',))
  with pytest.raises(ValueError, match='nothing tells what observations hold'):
    policy(env=None)


@pytest.mark.parametrize(
  ('norm_stats', 'message'),
  [
    ({'state': STATS['state']}, "of 'actions', and there are"),
    (STATS | {'actions': {'q01': [0.0]}}, "'mean' and 'std' of 'actions'"),
    (STATS | {'state': {'mean': [0.0], 'std': [1.0]}}, 'state has 2 numbers'),
    (
      STATS | {'actions': {'mean': [0.0] * 3, 'std': [1.0] * 3}},
      'actions have 2 numbers, and their statistics have 3',
    ),
    (STATS | {'actions': {'mean': [0.0], 'std': ['x']}}, 'not two lists'),
    (STATS | {'actions': {'mean': [0.0], 'std': [-1.0]}}, 'below zero'),
  ],
)
def test_statistics_that_do_not_fit_are_refused(norm_stats, message):
  with pytest.raises(ValueError, match=message):
    policy(norm_stats=norm_stats)


def test_states_and_actions_are_in_the_units_of_the_data():
  made, plain = policy(norm_stats=STATS, critic=False), policy(critic=False)
  params = plain.init(KEY)
  _, obs = ENV.init(jnp.arange(B))
  keys = jax.random.split(jax.random.key(1), B)
  mean, std = (np.array(STATS['state'][x]) for x in ('mean', 'std'))
  raw = obs | {'state': np.asarray(obs['state']) * (std + 1e-6) + mean}
  x, want = made.act(params, raw, keys), plain.act(params, obs, keys)
  np.testing.assert_allclose(x.action.path, want.action.path, atol=1e-5)
  mean, std = (np.array(STATS['actions'][x]) for x in ('mean', 'std'))
  moves = np.asarray(x.action.path)[:, -1].reshape(B, CHUNK, 3)[..., :2]
  np.testing.assert_allclose(
    made.to_env_action(x.action),
    np.clip(moves * (std + 1e-6) + mean, -1.0, 1.0),
    atol=1e-5,
  )


def test_only_executed_actions_have_a_probability():
  env = push.push(horizon=4, image_size=SIZE)
  made = policy(env, executed=1, norm_stats=STATS)
  params = made.init(KEY)
  _, obs = env.init(jnp.arange(B))
  keys = jax.random.split(jax.random.key(1), B)
  x = jax.jit(made.act)(params, obs, keys)
  assert x.action.path.shape == (B, 5, CHUNK * 3)
  assert made.to_env_action(x.action).shape == (B, 2)
  index = int(x.action.stochastic[0, 0]) + 1
  evaluate = jax.jit(made.evaluate)
  for number, differs in ((1, True), (2, False), (3, False)):
    path = x.action.path.at[0, index, number].add(0.1)
    logp = evaluate(params, obs, x.action._replace(path=path)).logp
    moved = abs(float(logp[0] - x.logp[0]))
    assert (moved > 1e-3) if differs else (moved < 1e-5)
  # Demonstrations still have whole chunks.
  action = jnp.zeros((B, CHUNK, 2))
  assert made.imitation_loss(params, obs, action, keys).shape == (B,)


def test_bytes_are_rounded_once(monkeypatch):
  vision = dataclasses.replace(config().vision, dtype='bfloat16')
  sizes = dataclasses.replace(config(), vision=vision)
  made = pi0_policy.policy(ENV, sizes, instruction=(2, 7, 5), critic=False)
  seen = []

  def embed(config, params, image):
    seen.append(image)
    return jnp.zeros((len(image), 4, 16))

  monkeypatch.setattr(pi0, 'embed_images', embed)
  _, obs = ENV.init(jnp.arange(1))
  image = np.arange(3 * SIZE**2, dtype=np.uint8).reshape(1, SIZE, SIZE, 3)
  obs |= {'image': {'table': jnp.asarray(image)}}
  made.act(made.init(KEY), obs, jax.random.split(KEY, 1))
  want = image / 127.5 - 1.0
  error = np.abs(np.asarray(seen[0], np.float64) - want)
  # Half a unit of bfloat16, and of float32 in numbers of one.
  assert (error <= 2.0**-8 * np.abs(want) + 2.0**-24).all()


def test_imitation_alone_sees_changed_pictures():
  plain, augmented = policy(), policy(augment=True)
  params = plain.init(KEY)
  _, obs = ENV.init(jnp.arange(B))
  keys = jax.random.split(jax.random.key(1), B)
  action = jnp.zeros((B, CHUNK, 2))

  def loss(own, **settings):
    run = jax.jit(functools.partial(own.imitation_loss, **settings))
    return np.asarray(run(params, obs, action, keys))

  want = loss(plain)
  assert (loss(augmented) == want).all()
  assert (loss(plain, train=True) == want).all()
  # The noise and the time of a row are the same, and half of the pictures keep
  # their colors, but each is cropped.
  assert (np.abs(loss(augmented, train=True) - want) > 1e-6).all()


def test_pi05_reads_the_state_behind_its_instruction():
  quantiles = {'q01': [-1.0, -1.0], 'q99': [1.0, 1.0]}
  made = policy(
    adaptive=True,
    ignored=(),
    state_tokens=STATE_TOKENS,
    norm_stats={'state': quantiles, 'actions': quantiles},
    critic=False,
  )
  params = made.init(KEY)
  _, obs = ENV.init(jnp.arange(B))
  # A bin is 1/128 wide: a number and another one of the same bin.
  state = jnp.array([[0.5, -0.25]] * B) + 0.002
  keys = jax.random.split(jax.random.key(1), B)
  act = jax.jit(made.act)
  path = lambda state: np.asarray(
    act(params, obs | {'state': state}, keys).action.path
  )
  np.testing.assert_array_equal(path(state), path(state + 0.004))
  moved = np.abs(path(state) - path(state + 0.01)).max((1, 2))
  assert (moved > 1e-5).all()


def test_images_of_another_size_are_resized_with_a_border():
  env = action_chunks.chunked(push.push(horizon=4, image_size=24), CHUNK, 0.9)
  made, plain = policy(env), policy()
  params = plain.init(KEY)
  _, obs = env.init(jnp.arange(B))
  keys = jax.random.split(jax.random.key(1), B)
  wide = obs | {'image': {'table': obs['image']['table'][:, :12]}}
  small = pictures.resize_with_pad(wide['image']['table'], SIZE)
  assert small.shape == (B, SIZE, SIZE, 3) and not small[:, :4].any()
  np.testing.assert_array_equal(
    made.act(params, wide, keys).action.path,
    plain.act(params, obs | {'image': {'table': small}}, keys).action.path,
  )


@pytest.mark.parametrize('settings', [{}, {'lora': lora.Lora(rank=2)}])
def test_cloning_without_an_environment_exports_what_acts(settings, tmp_path):
  make = functools.partial(
    pi0_policy.policy,
    config=config(),
    instruction=(2, 7, 5),
    norm_stats=STATS,
    cameras=('image/table',),
    vectors=('state',),
    critic=False,
    **settings,
  )
  workflow = workflows.behavior_cloning(
    None, make, optimizers.adamw(3e-3), normalize_obs=False
  )
  _, obs = ENV.init(jnp.arange(B))
  action = jax.random.normal(jax.random.key(2), (B, CHUNK, 2))
  batch = base.Demonstration(obs, action)
  state, losses = workflow.init(KEY), []
  start, step = state, jax.jit(workflow.step)
  for i in range(12):
    state, info = step(state, batch, jax.random.key(i))
    losses.append(read(info)['train/loss'])
  assert np.mean(losses[-4:]) < np.mean(losses[:4])
  before, after = start.actor.params, state.actor.params
  if settings:
    jax.tree.map(
      np.testing.assert_array_equal, before[base.FROZEN], after[base.FROZEN]
    )
  pi0_policy.export(
    tmp_path, workflow.params(state), config=config(), norm_stats=STATS
  )
  stored = normalization.read(tmp_path)
  assert stored == STATS
  again = policy(norm_stats=stored, checkpoint=str(tmp_path), critic=False)
  keys = jax.random.split(jax.random.key(1), B)
  want = make(ENV).act(after, obs, keys)
  got = again.act(again.init(KEY), obs, keys)
  np.testing.assert_allclose(got.action.path, want.action.path, atol=1e-4)
