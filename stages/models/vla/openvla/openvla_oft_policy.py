"""OpenVLA-OFT as a policy: it decides a chunk of actions in one pass."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from stages import base
from stages.language import sample, value_model
from stages.models.vla.openvla import action_tokens, openvla, openvla_oft


def policy(
  config: openvla_oft.Config,
  stats: action_tokens.ActionStats,
  *,
  logp_of: Literal['action', 'token'] = 'action',
  sampling: sample.Sampling = sample.Sampling(),
  critic: bool = True,
  state_stats: action_tokens.ActionStats | None = None,
) -> base.Policy:
  """A policy `openvla_oft.Observation -> action`, [B, Z A].

  With the head 'token', actions are int32 tokens, of which only those of
  actions have a probability. They are independent of each other given the
  observation, as in SimpleVLA-RL and RLinf. Rows of a group share one pass.

  With the head 'l1', actions are normalized real numbers without a
  probability: such a policy is cloned and evaluated, and `evaluate` refuses.

  `to_env_action` gives chunks [Z, A] in the units of the robot.

  Args:
    config: the model.
    stats: statistics of the actions of its data set.
    logp_of: what has a log-probability: a chunk [B], the sum over its tokens,
      which the workflows of environments take; or each token [B, Z A].
    sampling: distribution to sample tokens from, and to score them under.
    critic: whether there is a value of the observation: a vector times the
      normalized state that predicts the first token.
    state_stats: statistics by which the robot's state is normalized; None where
      observations have a normalized one.

  Raises:
    ValueError: if the statistics are of actions of another length.
  """
  _check(config, stats, state_stats)
  base_config = config.openvla
  l1 = config.head == 'l1'
  reduce = (lambda x_BT: x_BT.sum(1)) if logp_of == 'action' else (lambda x: x)

  def states(params, obs: openvla_oft.Observation):
    if state_stats is not None and len(obs.state):
      state = action_tokens.normalize(state_stats, obs.state)
      obs = obs._replace(state=state)
    return openvla_oft.action_states(config, params, obs)

  def init(key):
    params = openvla_oft.init_params(config, key)
    if critic:
      params[base.CRITIC] = value_model.init_head(base_config.llama)
    return params

  def act(params, obs, key_B, *, group_size=1, greedy=False):
    x_NTD = states(params, jax.tree.map(lambda x: x[::group_size], obs))
    repeat = functools.partial(jnp.repeat, repeats=group_size, axis=0)
    if l1:
      action_BT = repeat(openvla_oft.regress(config, params, x_NTD))
      logp = reduce(jnp.zeros_like(action_BT))
    else:
      logit_NTV = openvla.action_logits(base_config, params, x_NTD)
      logit_BTV = repeat(sample.shape(logit_NTV, sampling))
      if greedy:
        bin_BT = jnp.argmax(logit_BTV, -1)
      else:
        # One key a row: its tokens are drawn together.
        bin_BT = jax.vmap(jax.random.categorical)(key_B, logit_BTV)
      action_BT = bin_BT.astype(jnp.int32) + base_config.tokens.start
      logp = reduce(sample.logp(logit_BTV, bin_BT))
    zero_B = jnp.zeros(action_BT.shape[:1], logp.dtype)
    return base.Experience(obs, action_BT, logp, jnp.ones_like(logp), zero_B)

  def evaluate(params, obs, action_BT, *, group_size=1):
    if l1:
      raise ValueError(
        'Actions of the L1 head have no probability, which reinforcement '
        "learning needs: take a model with head = 'token'."
      )
    x_NTD = states(params, jax.tree.map(lambda x: x[::group_size], obs))
    x_BTD = jnp.repeat(x_NTD, group_size, axis=0)
    bin_BT = action_BT - base_config.tokens.start
    logit_BTV = openvla.action_logits(base_config, params, x_BTD)
    logit_BTV = sample.shape(logit_BTV, sampling, keep_BT=bin_BT)
    logp, entropy = sample.logp(logit_BTV, bin_BT), sample.entropy(logit_BTV)
    value_B = None
    if critic:
      value_B = openvla.values(base_config, params, x_BTD[:, :1])
    return base.Evaluation(reduce(logp), reduce(entropy), value_B)

  def value(params, obs):
    x_BTD = states(params, obs)
    return openvla.values(base_config, params, x_BTD[:, :1])

  def imitation_loss(params, obs, action_BT, key_B):
    del key_B  # Neither loss draws anything.
    if l1:
      got_BT = openvla_oft.regress(config, params, states(params, obs))
      # Summed as log-probabilities are: of a Laplace distribution, this is −lp.
      return jnp.abs(got_BT - action_BT).sum(1)
    token_BT = base_config.tokens.encode(action_BT)
    logp = evaluate(params, obs, token_BT).logp
    return -logp.reshape(logp.shape[0], -1).sum(1)

  def to_env_action(action):
    if not l1:
      action = base_config.tokens.decode(action)
    action = action.reshape(*action.shape[:-1], config.Z, config.A)
    return action_tokens.unnormalize(stats, action)

  narrow = jnp.dtype(base_config.llama.dtype) != base_config.llama.param_dtype
  return base.Policy(
    init,
    act,
    evaluate,
    to_env_action,
    value if critic else None,
    recompute_logp=narrow,
    sampling=sampling,
    imitation_loss=imitation_loss,
  )


def _check(
  config: openvla_oft.Config,
  stats: action_tokens.ActionStats,
  state_stats: action_tokens.ActionStats | None,
):
  what = [('actions', config.A, stats)]
  if state_stats is not None:
    what.append(('a state', config.O, state_stats))
  for name, size, x in what:
    if len(x.q01) != size:
      raise ValueError(
        f'The model has {name} of {size} numbers, and the statistics are of '
        f'{len(x.q01)}: give those of its own data set.'
      )
