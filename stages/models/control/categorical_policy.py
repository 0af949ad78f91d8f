"""A categorical policy: observations in, choices out."""

import itertools

import jax
import jax.numpy as jnp

from stages import base, granularity, ranges
from stages.envs import env as env_lib
from stages.models.control import cnn, mlp, shared_encoder


def policy(
  env: env_lib.Env,
  *,
  width: ranges.PositiveInt = 64,
  chunk: ranges.PositiveInt = 1,
  critic: bool = True,
  logp_of: granularity.LogpOf = 'chunk',
  value_of: granularity.ValueOf = 'chunk',
  camera_encoder: cnn.Config = cnn.Config(),
  ignored: tuple[str, ...] = (),
) -> base.Policy:
  """An actor and a critic, two small networks, for discrete actions.

  The choices of the dimensions of an action are independent, given the
  observation. An `action` is the vector of their indices, int32 [A].

  Args:
    env: its actions are discrete; its observations are vectors and images,
      alone or in a dict.
    width: of the hidden layers.
    chunk: steps that are decided at a time, as in `gaussian_policy.policy`.
    critic: whether the policy has a critic.
    logp_of: what has a log-probability, see `granularity`; a token is a choice.
    value_of: what has a value, likewise.
    camera_encoder: the network of each camera, if there are images.
    ignored: names of observations that the policy does not read.

  Raises:
    ValueError: if actions are continuous, or the network cannot read an
      observation.
  """
  if not env.action_choices:
    raise ValueError(
      'The actions of this environment are numbers in a range, and these are '
      'choices: use gaussian_policy.policy.'
    )
  choices = env.action_choices * chunk
  reduce = granularity.reducer(logp_of, chunk)
  Z = granularity.num_values(value_of, logp_of, chunk)
  config = mlp.Config(sum(choices), width, width)
  networks = shared_encoder.networks(
    cnn.encoder(env.obs_spec, camera_encoder, ignored),
    env.obs_spec,
    mlp.Logits(config),
    mlp.Critic(config, Z) if critic else None,
  )

  def log_probabilities(params, x):
    """log p of the choices of each dimension: a list of [..., n]."""
    ends = [*itertools.accumulate(choices)][:-1]
    parts = jnp.split(networks.actor(params, x), ends, -1)
    return [jax.nn.log_softmax(logits) for logits in parts]

  def act(params, obs, key_B, *, group_size=1, greedy=False):
    del group_size  # Nothing is shared within a group.
    logps = log_probabilities(params, networks.encode(params, obs))

    def draw(key, *logps):
      keys = jax.random.split(key, len(logps))
      return jnp.stack(list(map(jax.random.categorical, keys, logps)))

    if greedy:
      action_BA = jnp.stack([logp.argmax(-1) for logp in logps], -1)
    else:
      action_BA = jax.vmap(draw)(key_B, *logps)
    action_BA = action_BA.astype(jnp.int32)
    logp = reduce(_taken(logps, action_BA))
    one_B = jnp.ones_like(logps[0][:, 0])
    return base.Experience(obs, action_BA, logp, one_B, 0.0 * one_B)

  def evaluate(params, obs, action, *, group_size=1):
    del group_size
    x = networks.encode(params, obs)
    logps = log_probabilities(params, x)
    entropies = [-(jnp.exp(logp) * logp).sum(-1) for logp in logps]
    return base.Evaluation(
      reduce(_taken(logps, action)),
      reduce(jnp.stack(entropies, -1)),
      networks.value(params, x) if critic else None,
    )

  def value(params, obs):
    return networks.value(params, networks.encode(params, obs))

  def to_env_action(action):
    index = action.astype(jnp.result_type(float))
    shape = (chunk, -1) if chunk > 1 else (-1,)
    return index.reshape(*index.shape[:-1], *shape)

  return base.Policy(
    networks.init, act, evaluate, to_env_action, value if critic else None
  )


def _taken(logps, action):
  """The log-probability of each choice in `action`, [..., A]."""
  taken = [
    jnp.take_along_axis(logp, action[..., i, None], -1)[..., 0]
    for i, logp in enumerate(logps)
  ]
  return jnp.stack(taken, -1)
