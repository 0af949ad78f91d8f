"""OpenVLA as a policy: it acts by writing one token a dimension."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt8

from sharding import rules
from stages import base, granularity, ranges
from stages.language import sample, value_model
from stages.language.decoding import generate, kv_cache, prefill
from stages.models import transformer
from stages.vla.openvla import action_tokens, openvla


class Observation(NamedTuple):
  """A picture and an instruction.

  Attributes:
    image: the picture, bytes of any size.
    prompt: tokens of the published prompt, padded on the right; the first one
      is the beginning of the text.
  """

  image: UInt8[Array, 'B rows columns colors']
  prompt: base.Prompt


class _Prefix(NamedTuple):
  """Vectors of a picture and an instruction, one row a group.

  Attributes:
    x_NPD: the vectors.
    prompt: their tokens and mask; those of patches are arbitrary.
  """

  x_NPD: Array
  prompt: base.Prompt


def policy(
  config: openvla.Config,
  stats: action_tokens.ActionStats,
  *,
  chunk: ranges.PositiveInt = 1,
  logp_of: granularity.LogpOf = 'chunk',
  value_of: granularity.ValueOf = 'chunk',
  sampling: sample.Sampling = sample.Sampling(),
  critic: bool = True,
  augment: bool = False,
) -> base.Policy:
  """A policy `Observation -> action`, int32 [B, A] tokens of A dimensions.

  Dimensions are sampled one after the other, each given those before. Only
  action tokens have a probability, in sampling and in scoring alike. A picture
  and its instruction are read once for all tokens, and once a group.

  `to_env_action` decodes tokens to actions in the units of the robot.

  Args:
    config: the model.
    stats: statistics of the numbers that are decided in a step: those of all
      actions of a chunk, one action after the other.
    chunk: number of actions that are decided in a step.
    logp_of: what has a log-probability, see `granularity`.
    value_of: what has a value, likewise.
    sampling: distribution to sample tokens from, and to score them under.
    critic: whether there is a value of the observation: a vector times the
      normalized state that predicts the first token.
    augment: whether `imitation_loss` changes pictures at random in training, as
      `augmentation.OpenVla`. Its crops replace the central one, which the
      policy must have elsewhere.

  Raises:
    ValueError: if pictures are to be cropped at random and not in the center.
  """
  augmented = openvla.augmented(config) if augment else None
  llama = config.llama
  model = transformer.Transformer(llama)
  A = len(stats.q01)
  reduce = granularity.reducer(logp_of, chunk)
  Z = granularity.num_values(value_of, logp_of, chunk)

  def init(key):
    params = openvla.init_params(config, key)
    if critic:
      params[base.CRITIC] = value_model.init_head(llama, Z)
    return params

  def act(params, obs: Observation, key_B, *, group_size=1, greedy=False):
    prefix = _prefix(config, params, obs, group_size)
    action_BA, logp_BA = _decode(
      config, sampling, A, params, prefix, key_B, group_size, greedy
    )
    one_B = jnp.ones_like(logp_BA[:, 0])
    return base.Experience(obs, action_BA, reduce(logp_BA), one_B, 0.0 * one_B)

  def score(config, params, obs: Observation, action_BA, group_size):
    prefix = _prefix(config, params, obs, group_size)
    x_BAD = _states(model, params['llama'], prefix, action_BA, group_size)
    logit_BAV = openvla.action_logits(config, params, x_BAD)
    bin_BA = action_BA - config.tokens.start
    logit_BAV = sample.shape(logit_BAV, sampling, keep_BT=bin_BA)
    logp, entropy = sample.logp(logit_BAV, bin_BA), sample.entropy(logit_BAV)
    values = openvla.values(config, params, x_BAD[:, :1]) if critic else None
    return base.Evaluation(reduce(logp), reduce(entropy), values)

  def evaluate(params, obs: Observation, action_BA, *, group_size=1):
    return score(config, params, obs, action_BA, group_size)

  def value(params, obs: Observation):
    prefix = _prefix(config, params, obs, 1)
    x_BPD, _ = model.apply(
      {'params': params['llama']},
      prefix.x_NPD,
      prefix.prompt.mask,
      method='embedded_states',
    )
    return openvla.values(
      config, params, openvla.last_states(x_BPD, prefix.prompt.mask)
    )

  def imitation_loss(params, obs, action_BA, key_B, *, train=False):
    seen = config
    if train and augmented:
      seen, change = augmented
      obs = obs._replace(image=change((obs.image,), key_B)[0])
    token_BA = config.tokens.encode(action_BA)
    logp = score(seen, params, obs, token_BA, 1).logp
    return -granularity.whole(logp, 1)

  def to_env_action(action):
    return action_tokens.unnormalize(stats, config.tokens.decode(action))

  return base.Policy(
    init,
    act,
    evaluate,
    to_env_action,
    value if critic else None,
    recompute_logp=jnp.dtype(llama.dtype) != llama.param_dtype,
    sampling=sampling,
    round_params=functools.partial(openvla.compute_params, config),
    imitation_loss=imitation_loss,
  )


def _prefix(
  config: openvla.Config, params, obs: Observation, group_size: int
) -> _Prefix:
  """Reads the picture and the instruction of each group."""
  image, prompt = jax.tree.map(lambda x: x[::group_size], tuple(obs))
  x_NPD = openvla.embed_prompt(config, params, image, prompt.token)
  patches = x_NPD.shape[0], x_NPD.shape[1] - prompt.token.shape[1]
  return _Prefix(
    x_NPD,
    base.Prompt(
      openvla.insert_patches(
        prompt.token, jnp.zeros(patches, prompt.token.dtype)
      ),
      openvla.insert_patches(prompt.mask, jnp.ones(patches, prompt.mask.dtype)),
    ),
  )


def _states(model, params, prefix: _Prefix, action_BA, group_size: int):
  """States [B, A, D] that predict the tokens of an action, in one pass."""
  token_BT = action_BA[:, :-1]
  x_BTD = model.apply({'params': params}, token_BT, method='embed')
  prompt = jnp.repeat(prefix.x_NPD, group_size, axis=0)
  mask_BP = jnp.repeat(prefix.prompt.mask, group_size, axis=0)
  x_BSD = jnp.concatenate([prompt, x_BTD], axis=1)
  mask_BS = jnp.concatenate([mask_BP, jnp.ones_like(token_BT)], axis=1)
  x_BSD, _ = model.apply(
    {'params': params}, x_BSD, mask_BS, method='embedded_states'
  )
  P = mask_BP.shape[1]
  return jnp.concatenate(
    [openvla.last_states(x_BSD[:, :P], mask_BP), x_BSD[:, P:]], axis=1
  )


def _decode(
  config: openvla.Config,
  sampling: sample.Sampling,
  A: int,
  params: Any,
  prefix: _Prefix,
  key_B,
  group_size: int,
  greedy: bool,
) -> tuple[Int[Array, 'B A'], Any]:
  """Samples the tokens of an action, with keys and values of the prefix."""
  c = config.llama
  model, B = transformer.Transformer(c), key_B.shape[0]
  llama = rules.gather(transformer.compute_params(c, params['llama']))
  split = prefill.split_prompt(
    jax.tree.map(lambda x: jnp.repeat(x, group_size, 0), prefix.prompt),
    group_size,
  )
  _, cache = model.apply(
    {'params': llama}, prefix.x_NPD, split.mask_NP, method='embedded_states'
  )
  layers = prefill.cached_layers(model, llama, cache)
  start = generate.DecodeState(
    jnp.zeros((), jnp.int32),
    split.token_B,
    kv_cache.empty(c, B, A),
    generate.empty_completions(c, B, A),
  )

  def extend(state: generate.DecodeState, _):
    x_B1D, state = generate.decode_states(
      model, llama, layers, split, jnp.zeros(B, jnp.int32), state
    )
    logit = sample.shape(
      openvla.action_logits(config, {'llama': llama}, x_B1D), sampling
    )
    if greedy:
      bin_B = jnp.argmax(logit[:, 0], axis=-1).astype(jnp.int32)
    else:
      fold = functools.partial(jax.random.fold_in, data=state.t)
      bin_B = sample.draw(jax.vmap(fold)(key_B), logit[:, 0])
      bin_B = bin_B.astype(jnp.int32)
    token_B = bin_B + config.tokens.start
    logp_B = sample.logp(logit, bin_B[:, None])[:, 0]
    state = state._replace(t=state.t + 1, token_B=token_B)
    return state, (token_B, logp_B)

  _, (token_AB, logp_AB) = jax.lax.scan(extend, start, length=A)
  return token_AB.T, logp_AB.T
