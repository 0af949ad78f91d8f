"""π0 and π0.5 as policies, which turn images and a state into chunks."""

import functools
import itertools
import pathlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from sharding import deferred
from stages import base, granularity, ranges, tree_paths
from stages.envs import action_range
from stages.envs import env as env_lib
from stages.models import lora as lora_lib
from stages.models.control import flow_policy
from stages.vla import (
  augmentation,
  frozen_parts,
  instructions,
  lerobot_processors,
  normalization,
  pictures,
  trunk_lora,
)
from stages.vla import (
  relative_actions as relative_lib,
)
from stages.vla.pi0 import (
  lerobot_config,
  pi0,
  pi0_critic,
  pi0_files,
  pi0_inputs,
  pi0_noise,
)

EXPERT, TRUNK = 'expert', 'trunk'
# Keys of the parts that may be frozen, see `frozen_parts`.
PARTS = {
  'vision': ('vision',),
  'projector': ('projector',),
  'language': (TRUNK,),
}
FROZEN_PARTS = tuple(itertools.chain(*PARTS.values()))


def policy(
  env: env_lib.Env | None,
  config: pi0.Config,
  *,
  instruction: tuple[int, ...] | None = None,
  state_tokens: instructions.StateTokens | None = None,
  checkpoint: str | None = None,
  norm_stats: dict[str, Any] | None = None,
  relative_actions: relative_lib.RelativeActions | None = None,
  cameras: tuple[str, ...] | None = None,
  vectors: tuple[str, ...] | None = None,
  ignored: tuple[str, ...] = (),
  executed: ranges.PositiveInt | None = None,
  num_steps: ranges.PositiveInt = 4,
  exploration: flow_policy.Exploration = flow_policy.Exploration(),
  logp_of: granularity.LogpOf = 'chunk',
  value_of: granularity.ValueOf = 'chunk',
  frozen: tuple[frozen_parts.Part, ...] = (),
  lora: lora_lib.Lora | None = None,
  critic: bool = True,
  critic_width: ranges.PositiveInt = 256,
  critic_reads: Literal['mean', 'tokens'] = 'mean',
  augment: bool = False,
) -> base.Policy:
  """A policy of π0 or π0.5 for an environment with cameras, or for data.

  Observations are a tree of images, uint8, and of float vectors, which together
  are the state. Images of another size are resized and get a black border, as
  in openpi. Chunks have `config.Z` actions of `config.A` numbers, of which the
  environment gets as many as it takes; only these count in log-probabilities,
  as in RLinf. See `flow_policy.of_networks`.

  The critic is a small network of the state and of the trunk's activations on
  the prefix, which it does not train.

  Args:
    env: where it acts; None for data of a robot without an environment.
    config: sizes of the model.
    instruction: tokens that tell all environments what to do; None for those of
      observations, see `instructions`.
    state_tokens: how π0.5 reads the state, behind the instruction.
    checkpoint: folder of weights to start from, see `pi0_files`; None for
      random ones.
    norm_stats: statistics of a data set by which states and actions are
      normalized, see `normalization.of`. With None, states are read as they
      are, and actions of −1 … 1 are the environment's range.
    relative_actions: which numbers of actions are relative to the state when
      their chunk is decided, see `relative_actions.mask`; `norm_stats` are of
      relative actions then. None for what these tell, and for absolute actions
      if they do not.
    cameras: paths of images in observations, in the order in which they are
      read; None for all of the environment, in the order of their names.
    vectors: paths of the vectors of the state, likewise.
    ignored: names of observations that the policy does not read.
    executed: first actions of a chunk that the environment gets, before the
      next chunk is decided; None for all Z. Only these have a log-probability.
    num_steps: K, steps from noise to actions.
    exploration: how actions are sampled. Flow-Noise adds a small network to
      the expert, `pi0_noise.Spread`.
    logp_of: what has a log-probability, as in `flow_policy.of_networks`: the
      chunk of executed actions, each of them, or each number.
    value_of: what has a value, see `granularity`.
    frozen: parts that are not trained, see `frozen_parts`; all three leave the
      expert and the critic.
    lora: adapters of the trunk, whose weights are then frozen with the vision
      tower, while the expert is trained in full; None or rank 0 for none.
    critic: whether the policy has a critic.
    critic_width: of its hidden layers.
    critic_reads: 'mean' for the mean of the activations over all tokens, as
      RLinf has it for π0.5; 'tokens' for those of all tokens, which tells where
      things are, in models with few of them.
    augment: whether training by imitation changes pictures at random, see
      `augmentation.Openpi`. Cameras with 'wrist' in their names are at one.

  Raises:
    ValueError: for observations or actions that the model does not fit.
  """
  frozen_parts.check(frozen, lora, (EXPERT,))
  _check_executed(config, executed)
  inputs = pi0_inputs.of(
    env,
    config,
    instruction=instruction,
    state_tokens=state_tokens,
    norm_stats=norm_stats,
    cameras=cameras,
    vectors=vectors,
    ignored=ignored,
  )
  Z = executed or config.Z
  width, to_env_action = _actions(env, config, norm_stats, Z)
  offset = _offset(inputs, relative_actions, width, norm_stats)
  encode = functools.partial(_encode, config, inputs)
  head = None
  if critic:
    length = _prefix_length(encode, config, env)
    head = pi0_critic.Critic(
      critic_width,
      1 if critic_reads == 'mean' else length,
      config,
      granularity.num_values(value_of, logp_of, Z),
    )
  spread = None
  if exploration.kind == 'noise':
    spread = pi0_noise.Spread(config.A)
  networks = flow_policy.Networks(
    functools.partial(_init, config, checkpoint, head, spread),
    encode,
    functools.partial(_velocity, config, spread),
    head and head.value,
    functools.partial(encode, change=augmentation.Openpi())
    if augment
    else None,
  )
  own = flow_policy.of_networks(
    networks,
    to_env_action,
    width=width,
    chunk=config.Z,
    action_width=config.A,
    executed=Z,
    num_steps=num_steps,
    exploration=exploration,
    logp_of=logp_of,
    offset=offset,
  )
  own = own._replace(
    round_params=functools.partial(pi0.compute_params, config),
    needs_raw_obs=norm_stats is not None,
  )
  if lora:
    return trunk_lora.wrap(own, lora, FROZEN_PARTS, TRUNK)
  return frozen_parts.freeze(own, frozen, PARTS)


def export(
  folder: str | pathlib.Path,
  params,
  *,
  config: pi0.Config,
  norm_stats: dict[str, Any] | None = None,
  relative_actions: relative_lib.RelativeActions | None = None,
  data_set: str = 'data',
  cameras: tuple[str, ...] | None = None,
  executed: ranges.PositiveInt | None = None,
  num_steps: ranges.PositiveInt = 4,
):
  """Writes what a workflow has trained as a checkpoint, adapters added.

  Statistics are written as openpi has them, and as LeRobot's processors. With
  those of both states and actions, and with `cameras`, the folder has a
  config.json and LeRobot acts as the policy does without noise.

  Args:
    folder: folder to write.
    params: what `Workflow.params` returns; the critic and the network of
      Flow-Noise are left out.
    config: sizes of the model.
    norm_stats: statistics that go with it; None for none.
    relative_actions: as for `policy`.
    data_set: their name in the folder.
    cameras: as for `policy`; None where LeRobot is not to act, or cannot, as
      its models read a state.
    executed: as for `policy`.
    num_steps: as for `policy`.
  """
  own = trunk_lora.merge_if_adapted(params['policy'], part=TRUNK)
  own = frozen_parts.join(own)
  parts = {name: own[name] for name in (*FROZEN_PARTS, EXPERT)}
  pi0_files.write(folder, parts, config)
  if norm_stats is not None:
    norm_stats = _telling(norm_stats, relative_actions, config)
    normalization.write(folder, data_set, norm_stats)
    lerobot_processors.write(folder, norm_stats, adaptive=config.adaptive)
  if cameras and {'state', 'actions'} <= {*(norm_stats or ())}:
    lerobot_config.write(
      folder,
      config,
      norm_stats,
      cameras=cameras,
      executed=executed or config.Z,
      num_steps=num_steps,
    )


def _telling(norm_stats, relative, config: pi0.Config):
  """Statistics that tell which numbers of actions are relative."""
  of = functools.partial(
    normalization.of, norm_stats, quantiles=config.adaptive
  )
  if not relative:
    return norm_stats
  mask_A = relative_lib.mask(
    relative, len(of('actions').origin), len(of('state').origin)
  )
  own = {} if mask_A is None else {'relative': mask_A.tolist()}
  return norm_stats | {'actions': norm_stats['actions'] | own}


def _check_executed(config: pi0.Config, executed: int | None):
  if executed and executed > config.Z:
    raise ValueError(
      f'{executed} actions are to be executed, and a chunk has {config.Z}: '
      'lower `executed`, or make Z of the config larger.'
    )


def _actions(env: env_lib.Env | None, config: pi0.Config, norm_stats, Z: int):
  """Numbers of an environment's action, and how a chunk becomes actions."""
  if norm_stats is None:
    low, high = action_range.bounds(env, Z)
    width = len(env.action_low)
    to_env_action = functools.partial(action_range.bounded, False, low, high, Z)
  else:
    actions = normalization.of(norm_stats, 'actions', quantiles=config.adaptive)
    width = len(actions.origin)
    bounds = None if env is None else action_range.bounds(env)
    if env is not None and len(env.action_low) != width:
      raise ValueError(
        f"The environment's actions have {len(env.action_low)} numbers, and "
        f'their statistics have {width}: give those of its own data.'
      )
    to_env_action = functools.partial(_in_units, actions, bounds, Z)
  if width > config.A:
    raise ValueError(
      f"The environment's actions have {width} numbers, and the model has room "
      f'for {config.A}: make A of its config larger.'
    )
  return width, to_env_action


def _offset(inputs: pi0_inputs.Inputs, relative, width: int, norm_stats):
  """`obs -> offset` of relative actions; None if all are absolute."""
  state_width = 0 if inputs.state is None else len(inputs.state.origin)
  if norm_stats is None and relative:
    raise ValueError(
      'Relative actions are in the units of the robot, which statistics tell: '
      'give `norm_stats` of relative actions.'
    )
  told = (norm_stats or {}).get('actions', {}).get('relative')
  chosen = told if relative is None else relative
  mask_A = relative_lib.mask(chosen or False, width, state_width)
  if told is not None and chosen is not told:
    stored = relative_lib.mask(tuple(told), width, state_width)
    if not np.array_equal(mask_A, stored):
      raise ValueError(
        f'`relative_actions` is {relative}, and the statistics are of actions '
        f'that are relative by {told}: leave it out.'
      )
  if mask_A is None:
    return None
  return lambda obs: relative_lib.offset(mask_A, inputs.raw_state(obs))


def _in_units(
  actions: normalization.Normalization, bounds, Z: int, action, offset=None
):
  """A chunk in the units of the robot, within its bounds."""
  chunk = actions.unnormalize(action.reshape(*action.shape[:-1], Z, -1))
  if offset is not None:
    chunk += offset[..., None, :]
  if bounds is not None:
    low, high = (action_range.broadcast(x, chunk) for x in bounds)
    chunk = jnp.clip(chunk, low, high)
  return chunk if Z > 1 else chunk[..., 0, :]


def _init(config, checkpoint, critic, spread, key):
  """Parameters by part."""
  model_key, critic_key = jax.random.split(key)
  # Only shapes are needed while a program is traced.
  if checkpoint is None or deferred.only_shapes(key):
    params = pi0.init_params(config, model_key)
  else:
    params = pi0_files.read(checkpoint, config)
  if critic:
    params[base.CRITIC] = critic.init(critic_key)
  if spread:
    spread_key = jax.random.fold_in(critic_key, 1)
    params[pi0_noise.SPREAD] = spread.init_params(config.expert.D, spread_key)
  return params


def _prefix_length(encode, config: pi0.Config, env: env_lib.Env | None) -> int:
  """Tokens of a prefix."""
  if env is None:
    raise ValueError(
      'Without an environment there are no rewards, which a critic learns '
      'from: set critic = False.'
    )
  params = jax.eval_shape(lambda: pi0.init_params(config, jax.random.key(0)))
  obs = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), env.obs_spec
  )
  prefix, _ = jax.eval_shape(encode, params, obs)
  return prefix.mask.shape[1]


def _encode(
  config: pi0.Config,
  inputs: pi0_inputs.Inputs,
  params,
  obs,
  key_B=None,
  *,
  change: augmentation.Openpi | None = None,
):
  """The prefix, with all leading dimensions as one, and the padded state.

  With `change`, pictures are changed at random; `key_B` has a key a row.
  """
  leaves, embedded = tree_paths.flatten(obs), []
  for name in inputs.cameras:
    image = leaves[name].reshape(-1, *leaves[name].shape[-3:])
    image = pictures.resize_with_pad(image, config.vision.image_size)
    if change is not None:
      image = image.astype(jnp.float32) / 255.0
      image = change(image, key_B, at_wrist='wrist' in name) * 2.0 - 1.0
    else:
      image = image.astype(jnp.float32) / 127.5 - 1.0
    # Rounded once, after the arithmetic: bfloat16 has 8 bits.
    image = image.astype(config.vision.dtype)
    embedded.append(pi0.embed_images(config, params, image))
  seen = jnp.concatenate(embedded, axis=1)
  prompt = inputs.prompt(obs)
  words = pi0.embed_tokens(config, params, prompt.token)
  is_token = [jnp.ones(seen.shape[:2], bool), prompt.mask > 0]
  x = jnp.concatenate([seen, words], axis=1)
  prefix = pi0.encode(config, params, x, jnp.concatenate(is_token, axis=1))
  return prefix, inputs.read_state(obs, config.O)


def _velocity(config: pi0.Config, spread, params, context, x, t):
  """The velocity, and what the noise of Flow-Noise follows from, or None."""
  prefix, state = context
  y_BZD = pi0.expert_states(
    config,
    params,
    prefix,
    state.reshape(-1, config.O),
    x.reshape(-1, config.Z, config.A),
    t.reshape(-1),
  )
  v = pi0.velocity_of(params, y_BZD).reshape(x.shape)
  if spread is None:
    return v, None
  own = {'params': params[pi0_noise.SPREAD]}
  return v, spread.apply(own, y_BZD).astype(x.dtype).reshape(x.shape)
