"""OpenVLA-OFT as a policy: it decides a chunk of actions in one pass."""

from collections.abc import Callable
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stages import base, granularity
from stages.language import sample, value_model
from stages.vla.openvla import action_tokens, openvla, openvla_oft


def policy(
  config: openvla_oft.Config,
  stats: action_tokens.ActionStats,
  *,
  logp_of: granularity.LogpOf = 'chunk',
  value_of: granularity.ValueOf = 'chunk',
  sampling: sample.Sampling = sample.Sampling(),
  critic: bool = True,
  state_stats: action_tokens.ActionStats | None = None,
  augment: bool = False,
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
    logp_of: what has a log-probability, see `granularity`.
    value_of: what has a value, likewise.
    sampling: distribution to sample tokens from, and to score them under.
    critic: whether there is a value of the observation: a vector times the
      normalized state that predicts the first token.
    state_stats: statistics by which the robot's state is normalized; None where
      observations have a normalized one.
    augment: whether `imitation_loss` changes pictures at random in training, as
      `augmentation.OpenVla`. Its crops replace the central one, which the
      policy must have elsewhere.

  Raises:
    ValueError: if the statistics are of actions of another length, pictures are
      to be cropped at random and not in the center, or the head has no
      probabilities of what `logp_of` names.
  """
  _check(config, stats, state_stats, logp_of)
  llama = config.openvla.llama
  l1 = config.head == 'l1'
  head = _l1_head(config) if l1 else _token_head(config, sampling)
  reduce = granularity.reducer(logp_of, config.Z)
  Z = granularity.num_values(value_of, logp_of, config.Z)

  augmented = _augmented(config) if augment else None

  def states(params, obs: openvla_oft.Observation, config=config):
    if state_stats is not None and len(obs.state):
      state = action_tokens.normalize(state_stats, obs.state)
      obs = obs._replace(state=state)
    return openvla_oft.action_states(config, params, obs)

  def init(key):
    params = openvla_oft.init_params(config, key)
    if critic:
      params[base.CRITIC] = value_model.init_head(llama, Z)
    return params

  def act(params, obs, key_B, *, group_size=1, greedy=False):
    x_NTD = states(params, jax.tree.map(lambda x: x[::group_size], obs))
    repeat = functools.partial(jnp.repeat, repeats=group_size, axis=0)
    action_BT, logp_BT = head.act(params, x_NTD, key_B, repeat, greedy)
    one_B = jnp.ones_like(logp_BT[:, 0])
    return base.Experience(obs, action_BT, reduce(logp_BT), one_B, 0.0 * one_B)

  def evaluate(params, obs, action_BT, *, group_size=1):
    x_NTD = states(params, jax.tree.map(lambda x: x[::group_size], obs))
    x_BTD = jnp.repeat(x_NTD, group_size, axis=0)
    logp_BT, entropy_BT = head.score(params, x_BTD, action_BT)
    values = None
    if critic:
      values = openvla.values(config.openvla, params, x_BTD[:, :1])
    return base.Evaluation(reduce(logp_BT), reduce(entropy_BT), values)

  def value(params, obs):
    x_BTD = states(params, obs)
    return openvla.values(config.openvla, params, x_BTD[:, :1])

  def imitation_loss(params, obs, action_BT, key_B, *, train=False):
    seen = augmented(obs, key_B) if train and augmented else (obs, config)
    return head.loss(params, states(params, *seen), action_BT)

  def to_env_action(action):
    action = head.decode(action)
    action = action.reshape(*action.shape[:-1], config.Z, config.A)
    return action_tokens.unnormalize(stats, action)

  return base.Policy(
    init,
    act,
    evaluate,
    to_env_action,
    value if critic else None,
    recompute_logp=jnp.dtype(llama.dtype) != llama.param_dtype,
    sampling=sampling,
    needs_raw_obs=state_stats is not None,
    round_params=functools.partial(openvla_oft.compute_params, config),
    imitation_loss=imitation_loss,
  )


def _augmented(config: openvla_oft.Config) -> Callable:
  """Returns `obs, key_B -> obs, config` for training on changed pictures."""
  whole, change = openvla.augmented(config.openvla)
  uncropped = dataclasses.replace(config, openvla=whole)

  def augmented(obs: openvla_oft.Observation, key_B):
    return obs._replace(images=change(obs.images, key_B)), uncropped

  return augmented


class _Head(NamedTuple):
  """The functions that make a chunk of actions of hidden states.

  Attributes:
    act: `params, x_NTD, key_B, repeat, greedy -> action_BT, logp_BT`, where
      `repeat` gives each row of a group that of its group.
    score: `params, x_BTD, action_BT -> logp_BT, entropy_BT`.
    loss: `params, x_BTD, action_BT -> loss_B`, of normalized actions that are
      imitated.
    decode: `action -> normalized action`.
  """

  act: Callable[..., tuple[jax.Array, jax.Array]]
  score: Callable[..., tuple[jax.Array, jax.Array]]
  loss: Callable[..., jax.Array]
  decode: Callable[[jax.Array], jax.Array]


def _token_head(config: openvla_oft.Config, sampling: sample.Sampling) -> _Head:
  """Tokens of actions, drawn independently of each other."""
  tokens = config.openvla.tokens

  def act(params, x_NTD, key_B, repeat, greedy):
    logit_NTV = openvla.action_logits(config.openvla, params, x_NTD)
    logit_BTV = repeat(sample.shape(logit_NTV, sampling))
    if greedy:
      bin_BT = jnp.argmax(logit_BTV, -1)
    else:
      # One key a row: its tokens are drawn together.
      bin_BT = jax.vmap(jax.random.categorical)(key_B, logit_BTV)
    action_BT = bin_BT.astype(jnp.int32) + tokens.start
    return action_BT, sample.logp(logit_BTV, bin_BT)

  def score(params, x_BTD, action_BT):
    bin_BT = action_BT - tokens.start
    logit_BTV = openvla.action_logits(config.openvla, params, x_BTD)
    logit_BTV = sample.shape(logit_BTV, sampling, keep_BT=bin_BT)
    return sample.logp(logit_BTV, bin_BT), sample.entropy(logit_BTV)

  def loss(params, x_BTD, action_BT):
    return -score(params, x_BTD, tokens.encode(action_BT))[0].sum(1)

  return _Head(act, score, loss, tokens.decode)


def _l1_head(config: openvla_oft.Config) -> _Head:
  """Normalized actions, without a probability."""

  def act(params, x_NTD, key_B, repeat, greedy):
    del key_B, greedy  # Nothing is drawn.
    action_BT = repeat(openvla_oft.regress(config, params, x_NTD))
    return action_BT, jnp.zeros_like(action_BT)

  def score(params, x_BTD, action_BT):
    raise ValueError(
      'Actions of the L1 head have no probability, which reinforcement '
      "learning needs: take a model with head = 'token'."
    )

  def loss(params, x_BTD, action_BT):
    # Summed as log-probabilities are: of a Laplace distribution, this is −lp.
    got_BT = openvla_oft.regress(config, params, x_BTD)
    return jnp.abs(got_BT - action_BT).sum(1)

  return _Head(act, score, loss, lambda action: action)


def _check(
  config: openvla_oft.Config,
  stats: action_tokens.ActionStats,
  state_stats: action_tokens.ActionStats | None,
  logp_of: granularity.LogpOf,
):
  if config.head == 'l1' and logp_of != 'chunk':
    raise ValueError(
      f'logp_of is {logp_of!r}, and the L1 head gives actions without a '
      "probability: take head = 'token', or leave out `logp_of`."
    )
  what = [('actions', config.A, stats)]
  if state_stats is not None:
    what.append(('a state', config.O, state_stats))
  for name, size, x in what:
    if len(x.q01) != size:
      raise ValueError(
        f'The model has {name} of {size} numbers, and the statistics are of '
        f'{len(x.q01)}: give those of its own data set.'
      )
