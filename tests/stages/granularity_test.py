"""Ratios of tokens, actions and chunks: log-probabilities, losses, errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_envs
from rlinf_jax.config import config
from stages import base, granularity, workflows
from stages.envs import action_chunks, push
from stages.envs import env as env_lib
from stages.learn import loss_terms, losses, optimizers
from stages.models.control import (
  categorical_policy,
  critics,
  flow_policy,
  gaussian_policy,
)
from stages.vla.openvla import openvla_oft, openvla_oft_env
from stages.workflows.embodied_grpo import objective as grpo_objective
from stages.workflows.embodied_ppo import flatten_time
from stages.workflows.embodied_ppo import objective as ppo_objective
from tests.stages.vla.openvla import openvla_env_test
from tests.stages.vla.pi0 import pi0_policy_test

Z, A = 2, 2
SHAPES = {'token': (Z, A), 'action': (Z,), 'chunk': ()}
SPACE = env_lib.Env(
  None,
  None,
  jax.ShapeDtypeStruct((3,), jnp.float32),
  (-1.0, 0.0),
  (1.0, 3.0),
  10,
)
POLICIES = {
  'choices': categorical_policy.policy,
  'gaussian': gaussian_policy.policy,
  'squashed': functools.partial(gaussian_policy.policy, bounding='tanh'),
  'flow_sde': functools.partial(flow_policy.policy, num_steps=3),
  'flow_noise': functools.partial(
    flow_policy.policy,
    num_steps=2,
    exploration=flow_policy.Exploration('noise'),
  ),
}


def check_policy(make, env, obs):
  """Scores are those of acting, in the shape of their kind, and add up."""
  keys = jax.random.split(jax.random.key(1), 4)
  policies = {
    'token': make(env, logp_of='token', value_of='action'),
    'action': make(env, logp_of='action'),
    'chunk': make(env, logp_of='chunk'),
  }
  params = policies['chunk'].init(jax.random.key(0))
  # All but the critics are the same; some critics start with zeros.
  by_kind = {
    k: params
    | {
      base.CRITIC: jax.tree.map(
        lambda x: jnp.sin(jnp.arange(1.0, x.size + 1)).reshape(x.shape),
        own.init(jax.random.key(0))[base.CRITIC],
      )
    }
    for k, own in policies.items()
  }
  # In other dimensions than in acting: steps of two rows.
  fold = lambda x: x.reshape(2, 2, *x.shape[1:])

  @jax.jit
  def run(by_kind):
    acted = {k: own.act(by_kind[k], obs, keys) for k, own in policies.items()}
    seen = jax.tree.map(fold, (obs, acted['chunk'].action))
    return (
      acted,
      {k: own.evaluate(by_kind[k], *seen) for k, own in policies.items()},
      {k: own.value(by_kind[k], seen[0]) for k, own in policies.items()},
    )

  acted, scored, values = run(by_kind)
  for k in SHAPES:
    assert values[k].shape == (2, 2, *((Z,) if k == 'token' else ()))
    assert (values[k] != 0).all()
    np.testing.assert_allclose(scored[k].value, values[k], rtol=0, atol=1e-5)
  for k, shape in SHAPES.items():
    x, now = acted[k], scored[k]
    assert x.logp.shape == (4, *shape) and x.mask.shape == (4,)
    assert now.logp.shape == now.entropy.shape == (2, 2, *shape)
    np.testing.assert_allclose(now.logp, fold(x.logp), rtol=0, atol=1e-5)
    for got, want in zip(now[:2], scored['chunk'][:2], strict=True):
      got = granularity.whole(got, 2)
      np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', POLICIES)
def test_policies_of_numbers_score_what_they_recorded(name):
  make = functools.partial(POLICIES[name], width=4, chunk=Z)
  env = SPACE
  if name == 'choices':
    env = SPACE._replace(action_choices=(3, 2))
  check_policy(make, env, jax.random.normal(jax.random.key(2), (4, 3)))


OFT = functools.partial(
  openvla_oft_env.policy,
  config=openvla_oft.Config(
    openvla_env_test.CONFIG, Z=Z, A=A, O=0, cameras=1, head='token'
  ),
  instruction=(1, 5, 3),
)


@pytest.mark.parametrize('name', ['openvla', 'openvla_oft'])
def test_policies_of_tokens_score_what_they_recorded(name):
  make = OFT
  if name == 'openvla':
    make = functools.partial(openvla_env_test.POLICY, chunk=Z)
  env = push.push(image_size=8)
  check_policy(make, env, env.init(jnp.arange(4))[1])


@pytest.mark.parametrize(
  ('adaptive', 'kind'), [(False, 'sde'), (True, 'noise')], ids=['pi0', 'pi05']
)
def test_pi0_scores_what_it_recorded(adaptive, kind):
  exploration = flow_policy.Exploration(kind)
  make = functools.partial(
    pi0_policy_test.policy, adaptive=adaptive, exploration=exploration
  )
  env = pi0_policy_test.ENV
  check_policy(make, env, env.init(jnp.arange(4))[1])


# Losses.

CLIP = loss_terms.Clip(0.1, 0.15, 1.5)
IMPORTANCE = loss_terms.Importance(cap=1.1)
BETA, ETA, COEF = 0.3, 0.02, 0.5
B, T, F = 4, 3, 5


def linear_policy(logp_of) -> base.Policy:
  """Gaussian actions with means, and values, linear in the observation."""
  reduce = granularity.reducer(logp_of, Z)

  def evaluate(params, obs, action, *, group_size=1):
    mean = obs @ params['mean']
    log_std = jnp.broadcast_to(params['log_std'], mean.shape)
    return base.Evaluation(
      reduce(gaussian_policy.gaussian(action, mean, log_std)),
      reduce(gaussian_policy.gaussian_entropy(log_std)),
      obs @ params['value'],
    )

  return base.Policy(None, None, evaluate)


def batch(logp_of, value_of='chunk'):
  """Random experience, a reference's log-probabilities, and parameters."""
  values = (Z,) if value_of == 'action' else ()
  rng = np.random.default_rng(0)
  numbers = B, T, Z * A
  reduce = granularity.reducer(logp_of, Z)
  obs = rng.normal(size=(B, T, F))
  params = {
    'mean': 0.3 * rng.normal(size=(F, Z * A)),
    'log_std': 0.1 * rng.normal(size=(Z * A)),
    'value': rng.normal(size=(F, *values)),
  }
  action = obs @ params['mean'] + rng.normal(size=numbers)
  log_std = np.broadcast_to(params['log_std'], numbers)
  now = gaussian_policy.gaussian(action, obs @ params['mean'], log_std)
  near = lambda size: reduce(now + size * rng.normal(size=numbers))
  mask = np.array([[1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 0, 0]], float)
  x = base.Experience(
    obs,
    action,
    near(0.1),
    jnp.asarray(mask),
    (),
    advantage=jnp.asarray(rng.normal(size=(B, T, *values))),
    value=jnp.asarray(rng.normal(size=(B, T, *values))),
    return_=jnp.asarray(rng.normal(size=(B, T, *values))),
    proximal=near(0.1),
    steps=jnp.array([[2.0, 2.0, 1.0], [2.0, 1.0, 2.0], [2.0] * 3, [1.0] * 3]),
  )
  return params, x, near(0.2)


def oracle(logp_of, params, x, ref, with_critic):
  """Loss, gradient and shares that are clipped, by loops in torch."""
  torch = pytest.importorskip('torch', reason='The reference needs torch.')
  p = {k: torch.tensor(v, requires_grad=True) for k, v in params.items()}
  y = jax.tree.map(lambda x: torch.tensor(np.array(x)), x)
  ref, mean = torch.tensor(np.array(ref)), y.obs @ p['mean']
  normal = torch.distributions.Normal(mean, p['log_std'].exp().expand_as(mean))
  every_logp, every_entropy = normal.log_prob(y.action), normal.entropy()
  parts = {
    'token': [((z, a), [z * A + a]) for z in range(Z) for a in range(A)],
    'action': [((z,), [z * A + a for a in range(A)]) for z in range(Z)],
    'chunk': [((), [*range(Z * A)])],
  }[logp_of]
  rows, clipped, n = [], 0, 0
  for b in range(B):
    terms = []
    for t in range(T):
      for at, numbers in parts:
        if not y.mask[b, t] or (at and at[0] >= y.steps[b, t]):
          continue
        lp = every_logp[b, t, numbers].sum()
        old, behavior = y.proximal[(b, t, *at)], y.logp[(b, t, *at)]
        # An action's own where there is one, else that of its step.
        own = at[:1] if y.advantage.ndim == 3 else ()
        gain, ratio = y.advantage[(b, t, *own)], torch.exp(lp - old)
        term = torch.max(
          -ratio * gain, -ratio.clamp(1 - CLIP.low, 1 + CLIP.high) * gain
        )
        if gain < 0:
          term = torch.min(term, -CLIP.dual * gain)
        outside = ratio < 1 - CLIP.low if gain < 0 else ratio > 1 + CLIP.high
        clipped, n = clipped + int(outside), n + 1
        term = term * torch.exp(old - behavior).clamp(max=IMPORTANCE.cap)
        term = term - ETA * every_entropy[b, t, numbers].sum()
        if with_critic:
          predicted = y.obs[b, t] @ p['value']
          error = predicted[own] - y.return_[(b, t, *own)]
          term = term + COEF * 0.5 * error**2
        else:
          delta = ref[(b, t, *at)] - lp
          term = term + BETA * (torch.exp(delta) - 1 - delta)
        terms.append(term)
    rows.append(terms)
  if with_critic:
    loss = sum(map(sum, rows)) / n
  else:
    loss = sum(sum(terms) / max(len(terms), 1) for terms in rows) / B
  loss.backward()
  return loss.item(), {k: v.grad for k, v in p.items()}, clipped / n


@pytest.mark.parametrize(
  'name, logp_of, value_of',
  [
    *((name, k, 'chunk') for name in ('grpo', 'ppo') for k in SHAPES),
    ('ppo', 'token', 'action'),
    ('ppo', 'action', 'action'),
  ],
)
def test_losses_and_gradients_are_those_of_torch(
  name, logp_of, value_of, in_float64
):
  params, x, ref = batch(logp_of, value_of)
  policy = linear_policy(logp_of)
  if name == 'grpo':
    loss = grpo_objective(
      policy,
      clip=CLIP,
      kl=loss_terms.KlPenalty(BETA),
      entropy_coef=ETA,
      aggregate=losses.sequence_mean_token_mean,
      importance=IMPORTANCE,
    )
    arguments = x, ref
  else:
    value = loss_terms.ValueLoss(COEF)
    loss = ppo_objective(
      policy, clip=CLIP, importance=IMPORTANCE, value=value, entropy_coef=ETA
    )
    arguments = (flatten_time(x._replace(truncated=None)),)

  def total(params):
    result = loss(params, (), *arguments)
    (mean,) = result.means
    return mean.sum / mean.count, result.info

  both = jax.jit(jax.value_and_grad(total, has_aux=True))
  (got, info), grads = both(params)
  want, gradient, clipped = oracle(logp_of, params, x, ref, name == 'ppo')
  np.testing.assert_allclose(got, want, rtol=1e-8)
  for k in gradient:
    if gradient[k] is not None:
      np.testing.assert_allclose(grads[k], gradient[k], rtol=1e-8, atol=1e-12)
  assert 0 < clipped < 1
  share = info['train/clip_fraction'].value()['']
  np.testing.assert_allclose(share, clipped, rtol=1e-9)


def test_tokens_of_actions_that_were_not_executed_do_not_count():
  params, x, _ = batch('token')
  rows = granularity.by_row(x)
  assert rows.logp.shape == rows.mask.shape == (B, T * Z * A)
  want = np.zeros((B, T, Z, A))
  want[0, :2], want[0, 2, 0], want[1, 0], want[1, 1, 0], want[3, 0, 0] = [1] * 5
  np.testing.assert_array_equal(rows.mask.reshape(want.shape), want)
  # A chunk counts as a whole.
  _, x, _ = batch('chunk')
  np.testing.assert_array_equal(granularity.by_row(x).mask, x.mask)


WORKFLOWS = {
  'ppo': functools.partial(
    workflows.embodied_ppo, num_envs=8, num_steps=4, num_minibatches=1
  ),
  'grpo': functools.partial(
    workflows.embodied_grpo, num_envs=8, group_size=4, num_minibatches=2
  ),
}


@pytest.mark.parametrize('name', WORKFLOWS)
def test_steps_whose_acting_rounds_otherwise_have_weights_of_tokens(name):
  def policy(env):
    own = gaussian_policy.policy(env, width=4, chunk=Z, logp_of='token')

    def act(*args, **kwargs):
      x = own.act(*args, **kwargs)
      return x._replace(logp=x.logp - jnp.array([0.1, 0.3])[None, :, None])

    return own._replace(act=act, recompute_logp=True)

  env = action_chunks.chunked(jax_envs.line(), Z, 0.9)
  workflow = WORKFLOWS[name](env, policy, optimizers.adamw(1e-3), num_epochs=1)
  _, info = workflow.step(
    workflow.init(jax.random.key(0)), (), jax.random.key(1)
  )
  read = lambda name: float(info[name].value()[''])
  # Steps of the last chunks, of which one action of two was executed, count
  # once, so that the mean is nearer to the gap of first actions.
  assert 0.1 < read('rollout/logprob_gap_mean') < 0.2
  np.testing.assert_allclose(read('rollout/logprob_gap_max'), 0.3, rtol=1e-4)
  np.testing.assert_allclose(read('train/ratio_max'), 1.0, rtol=0.1)


# Errors, and cloning.


def test_an_unknown_granularity_is_refused_at_the_door():
  with pytest.raises(ValueError, match="'tokens', and .* 'token', 'action'"):
    gaussian_policy.policy(SPACE, logp_of='tokens')
  with pytest.raises(ValueError, match="did you mean 'token'"):
    config.parse(
      ['gin_configs/ppo_openvla_maniskill.gin'],
      ["MODEL = 'model'", "openvla_env.pretrained.logp_of = 'tokens'"],
      'unused',
    )


def test_values_of_actions_need_ratios_of_actions_or_tokens():
  with pytest.raises(ValueError, match="set logp_of to 'action' or 'token'"):
    gaussian_policy.policy(SPACE, value_of='action')
  with pytest.raises(ValueError, match="'actions', and .* 'action' or 'chunk'"):
    gaussian_policy.policy(SPACE, logp_of='token', value_of='actions')


def test_a_head_without_probabilities_has_none_of_tokens():
  regression = dataclasses.replace(OFT.keywords['config'], head='l1')
  env = push.push(image_size=8)
  with pytest.raises(
    ValueError, match="'token', and the L1 head gives actions"
  ):
    OFT(env, config=regression, logp_of='token')


def test_sac_refuses_log_probabilities_of_tokens():
  with pytest.raises(ValueError, match='SAC takes that of a whole chunk'):
    workflows.sac(
      jax_envs.line(),
      functools.partial(gaussian_policy.policy, width=4, logp_of='token'),
      functools.partial(critics.ensemble, width=4),
      optimizers.adamw(1e-3),
      num_envs=4,
      num_steps=2,
      capacity=16,
    )


def test_scores_of_other_parts_than_were_recorded_are_refused():
  params, x, ref = batch('token')
  loss = grpo_objective(linear_policy('action'))
  with pytest.raises(ValueError, match='must be of the same tokens, actions'):
    loss(params, (), x, ref)


def test_cloning_is_of_whole_actions(in_float64):
  def loss(logp_of):
    make = functools.partial(gaussian_policy.policy, width=4, logp_of=logp_of)
    env = push.push()
    workflow = workflows.behavior_cloning(env, make, optimizers.adamw(1e-3))
    _, obs = env.init(jnp.arange(3))
    shown = base.Demonstration(obs, jnp.full((3, A), 0.5))
    state = workflow.init(jax.random.key(0))
    _, info = workflow.step(state, shown, jax.random.key(1))
    return [float(info[f'train/{x}'].value()['']) for x in ('loss', 'entropy')]

  np.testing.assert_allclose(loss('token'), loss('chunk'), rtol=1e-12)
