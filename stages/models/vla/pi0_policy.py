"""π0 and π0.5 as policies, which turn images and a state into chunks."""

import functools
import math

import jax
import jax.numpy as jnp

from stages import base, ranges, tree_paths
from stages.models.control import flow_policy, mlp
from stages.models.vla import instructions, pi0, pi0_files

EXPERT = 'expert'


def policy(
  env: base.Env,
  config: pi0.Config,
  *,
  instruction: tuple[int, ...] | None = None,
  checkpoint: str | None = None,
  num_steps: ranges.PositiveInt = 4,
  exploration: flow_policy.Exploration = flow_policy.Exploration(),
  expert_only: bool = False,
  critic: bool = True,
  critic_width: ranges.PositiveInt = 256,
  ignored: tuple[str, ...] = (),
) -> base.Policy:
  """A policy of π0 or π0.5 for an environment with cameras.

  Observations are a tree of images, uint8, in the order of their names, and of
  float vectors, which together are the state. Chunks have `config.Z` actions of
  `config.A` numbers, of which the environment gets as many as it takes; only
  these count in log-probabilities, as in RLinf. See `flow_policy.of_networks`.

  The critic is a small network of the state and of the mean over the prefix of
  the trunk's activations, which it does not train.

  Args:
    env: its images are as large as those of `config.vision`.
    config: sizes of the model.
    instruction: tokens that tell all environments what to do; None for those of
      observations, see `instructions`.
    checkpoint: folder of weights to start from, see `pi0_files`; None for
      random ones.
    num_steps: K, steps from noise to actions.
    exploration: how actions are sampled, by Flow-SDE.
    expert_only: whether all but the expert and the critic is frozen.
    critic: whether the policy has a critic.
    critic_width: of its hidden layers.
    ignored: names of observations that the policy does not read. π0.5 reads the
      state in its instruction, which is fixed here, so its vectors are ignored.

  Raises:
    ValueError: for observations or actions that the model does not fit.
  """
  instructions.check(env, instruction)
  cameras, vectors = _sorted(env, config, (*ignored, *instructions.NAMES))
  if exploration.kind != 'sde':
    raise ValueError(
      'The expert of π0 predicts no sizes of noise, which Flow-Noise needs: '
      "give exploration.kind = 'sde'."
    )
  networks = flow_policy.Networks(
    functools.partial(
      _init, config, checkpoint, expert_only, critic and critic_width
    ),
    functools.partial(_encode, config, instruction, cameras, vectors),
    functools.partial(_velocity, config),
    functools.partial(_value, config, critic_width) if critic else None,
  )
  return flow_policy.of_networks(
    env,
    networks,
    chunk=config.Z,
    action_width=config.A,
    num_steps=num_steps,
    exploration=exploration,
  )


def _sorted(env: base.Env, config: pi0.Config, ignored: tuple[str, ...]):
  """Names of the cameras and of the vectors; refuses what does not fit."""
  size, cameras, vectors = config.vision.image_size, [], []
  width = 0
  for name, x in tree_paths.flatten(env.obs_spec).items():
    if name in ignored:
      continue
    if x.dtype == jnp.uint8 and len(x.shape) == 3:
      if x.shape != (size, size, 3):
        raise ValueError(
          f'The image {name!r} is {[*x.shape]}, and the model reads '
          f'{[size, size, 3]}: let the environment render images of this size.'
        )
      cameras.append(name)
    elif jnp.issubdtype(x.dtype, jnp.floating) and len(x.shape) == 1:
      vectors.append(name)
      width += x.shape[0]
    else:
      raise ValueError(
        'π0 reads images, uint8 [rows, columns, colors], and float vectors, '
        f'and the environment returns {name!r}, {x.dtype} {[*x.shape]}: add it '
        'to `ignored` if the policy can do without.'
      )
  if not cameras:
    raise ValueError(
      f'π0 reads images, and the environment returns {[*vectors]}.'
    )
  if config.adaptive and vectors:
    raise ValueError(
      'π0.5 reads the state in its instruction, and the instruction of this '
      f'policy is fixed: take π0, or add {vectors} to `ignored`.'
    )
  for letter, got, most in (
    ('O', width, config.O),
    ('A', len(env.action_low), config.A),
  ):
    if got > most:
      what = {'O': 'state', 'A': 'actions'}[letter]
      raise ValueError(
        f"The environment's {what} have {got} numbers, and the model has room "
        f'for {most}: make {letter} of its config larger.'
      )
  return tuple(cameras), tuple(vectors)


def _init(config, checkpoint, expert_only: bool, critic_width: int, key):
  """Parameters; those that are not trained are under `base.FROZEN`."""
  model_key, critic_key = jax.random.split(key)
  if checkpoint is None:
    params = pi0.init_params(config, model_key)
  else:
    params = pi0_files.read(checkpoint, config)
  if expert_only:
    frozen = {k: x for k, x in params.items() if k != EXPERT}
    params = {EXPERT: params[EXPERT], base.FROZEN: frozen}
  if critic_width:
    zeros = jnp.zeros(config.trunk.D + config.O)
    critic = _critic(config, critic_width)
    params[base.CRITIC] = critic.init(critic_key, zeros)['params']
  return params


def _critic(config: pi0.Config, width: int) -> mlp.Critic:
  features = config.trunk.D + config.O
  return mlp.Critic(mlp.Config(features, config.A, width, width))


def _encode(config, instruction, cameras, vectors, params, obs):
  """The prefix, with all leading dimensions as one, and the padded state."""
  params = params | params.get(base.FROZEN, {})
  leaves = tree_paths.flatten(obs)
  leading = leaves[cameras[0]].shape[:-3]
  rows = math.prod(leading)
  embedded = []
  for name in cameras:
    image = leaves[name].reshape(rows, *leaves[name].shape[-3:])
    image = image.astype(config.vision.dtype) / 127.5 - 1.0
    embedded.append(pi0.embed_images(config, params, image))
  seen = jnp.concatenate(embedded, axis=1)
  prompt = instructions.of_observation(leaves, instruction, rows)
  words = pi0.embed_tokens(config, params, prompt.token)
  is_token = [jnp.ones(seen.shape[:2], bool), prompt.mask > 0]
  x = jnp.concatenate([seen, words], axis=1)
  prefix = pi0.encode(config, params, x, jnp.concatenate(is_token, axis=1))
  states = [leaves[name] for name in vectors]
  padding = config.O - sum(x.shape[-1] for x in states)
  states.append(jnp.zeros((*leading, padding)))
  return prefix, jnp.concatenate(states, axis=-1)


def _velocity(config, params, context, x, t):
  prefix, state = context
  v_BZA = pi0.velocity(
    config,
    params,
    prefix,
    state.reshape(-1, config.O),
    x.reshape(-1, config.Z, config.A),
    t.reshape(-1),
  )
  return v_BZA.reshape(x.shape), None


def _value(config, width, params, context):
  prefix, state = context
  weight = prefix.mask[:, :, None].astype(state.dtype)
  output = jax.lax.stop_gradient(prefix.output).astype(state.dtype)
  pooled = (output * weight).sum(1) / weight.sum(1)
  pooled = pooled.reshape(*state.shape[:-1], -1)
  features = jnp.concatenate([pooled, state], axis=-1)
  variables = {'params': params[base.CRITIC]}
  return _critic(config, width).apply(variables, features)
