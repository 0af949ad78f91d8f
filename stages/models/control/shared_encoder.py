"""An actor and a critic on one encoder of observations."""

from collections.abc import Callable
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from stages import base
from stages.models.control import cnn, mlp


class Networks(NamedTuple):
  """Actor and critic on one encoder, as functions of their parameters.

  Attributes:
    init: `key -> params`.
    encode: `params, obs -> x`: the input of actor and critic, [..., O].
    actor: `params, x, *inputs -> output`, that of its module.
    value: `params, x -> value`; None without a critic.
  """

  init: Callable[[base.Key], base.Params]
  encode: Callable[[base.Params, Any], Any]
  actor: Callable[..., Any]
  value: Callable[[base.Params, Any], Any] | None


def networks(
  encoder: cnn.Encoder,
  obs_spec: Any,
  actor_net: nn.Module,
  critic_net: mlp.Critic | None,
  *inputs: jax.Array,
) -> Networks:
  """Joins networks; parameters are those of one observation's shapes.

  Args:
    encoder: of observations, see `cnn.encoder`.
    obs_spec: shapes of one observation.
    actor_net: called with an encoded observation and `inputs`.
    critic_net: called with an encoded observation; None for no critic.
    *inputs: zeros in the shapes of the actor's other inputs.
  """
  zero_obs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), obs_spec)
  encoded = jax.eval_shape(
    encoder.init_with_output, jax.random.key(0), zero_obs
  )[0]

  def init(key):
    actor_key, critic_key, encoder_key = jax.random.split(key, 3)
    x = jnp.zeros(encoded.shape, encoded.dtype)
    params = {'actor': actor_net.init(actor_key, x, *inputs)['params']}
    if critic_net is not None:
      params[base.CRITIC] = critic_net.init(critic_key, x)['params']
    if encoder.cameras:
      params['encoder'] = encoder.init(encoder_key, zero_obs)['params']
    return params

  def encode(params, obs):
    return encoder.apply({'params': params.get('encoder', {})}, obs)

  def actor(params, x, *inputs):
    return actor_net.apply({'params': params['actor']}, x, *inputs)

  def value(params, x):
    return critic_net.apply({'params': params[base.CRITIC]}, x)

  has_critic = critic_net is not None
  return Networks(init, encode, actor, value if has_critic else None)
