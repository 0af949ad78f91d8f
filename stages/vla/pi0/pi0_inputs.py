"""Inputs of π0 and π0.5 in an observation: images, a state, an instruction."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from stages import base, tree_paths
from stages.envs import env as env_lib
from stages.vla import instructions, normalization
from stages.vla.pi0 import pi0

MODEL = {False: 'π0', True: 'π0.5'}


class Inputs(NamedTuple):
  """Paths of the inputs of a model in observations.

  Attributes:
    cameras: paths of images, in the order in which they are read.
    vectors: paths of the vectors of the state.
    instruction: tokens of one instruction for all; None for those of
      observations.
    state: normalization of the state; None to read it as it is.
    state_tokens: how π0.5 reads it; None where the model does not.
  """

  cameras: tuple[str, ...]
  vectors: tuple[str, ...]
  instruction: tuple[int, ...] | None
  state: normalization.Normalization | None
  state_tokens: instructions.StateTokens | None

  def leading(self, obs) -> tuple[int, ...]:
    """Dimensions of observations before those of an image."""
    return tree_paths.flatten(obs)[self.cameras[0]].shape[:-3]

  def read_state(self, obs, width: int) -> Float[Array, '... O']:
    """The normalized state, padded with zeros to `width` numbers."""
    leaves = tree_paths.flatten(obs)
    states = [leaves[name] for name in self.vectors]
    if self.state is not None and states:
      states = [self.state.normalize(self.raw_state(obs))]
    padding = width - sum(x.shape[-1] for x in states)
    states.append(jnp.zeros((*self.leading(obs), padding)))
    return jnp.concatenate(states, axis=-1)

  def raw_state(self, obs) -> Float[Array, '... O']:
    """The state in the units of the robot."""
    leaves = tree_paths.flatten(obs)
    return jnp.concatenate([leaves[name] for name in self.vectors], axis=-1)

  def prompt(self, obs) -> base.Prompt:
    """The tokens of each row; of π0.5, with its state."""
    leaves, rows = tree_paths.flatten(obs), math.prod(self.leading(obs))
    prompt = instructions.from_observation(leaves, self.instruction, rows)
    if self.state_tokens is None:
      return prompt
    width = sum(leaves[name].shape[-1] for name in self.vectors)
    state_BO = self.read_state(obs, width).reshape(rows, width)
    return self.state_tokens.follow(prompt, state_BO)


def of(
  env: env_lib.Env | None,
  config: pi0.Config,
  *,
  instruction: tuple[int, ...] | None,
  state_tokens: instructions.StateTokens | None,
  norm_stats: Any,
  cameras: tuple[str, ...] | None,
  vectors: tuple[str, ...] | None,
  ignored: tuple[str, ...],
) -> Inputs:
  """The inputs of a policy; arguments are those of `pi0_policy.policy`.

  Raises:
    ValueError: if the model cannot read the observations.
  """
  if env is None:
    if cameras is None or vectors is None or norm_stats is None:
      raise ValueError(
        'Without an environment, nothing tells what observations hold: give '
        '`cameras`, `vectors` and `norm_stats`.'
      )
  else:
    instructions.check_env(env, instruction)
    cameras, vectors = _found(env, cameras, vectors, ignored)
  if not cameras:
    raise ValueError(
      f'π0 reads images, and the environment returns {[*(vectors or ())]}.'
    )
  if config.adaptive and vectors and state_tokens is None:
    raise ValueError(
      'π0.5 reads the state in its instruction: give `state_tokens`, see '
      f'`instructions.state_tokens`, or add {[*vectors]} to `ignored`.'
    )
  if not config.adaptive and state_tokens is not None:
    raise ValueError(
      'π0 reads the state as a vector, and `state_tokens` are of π0.5: leave '
      'them out, or make the config adaptive.'
    )
  state = None
  if norm_stats is not None and vectors:
    state = normalization.of(norm_stats, 'state', quantiles=config.adaptive)
  _check_state(env, config, vectors, state)
  return Inputs(cameras, vectors, instruction, state, state_tokens)


def _check_state(env, config: pi0.Config, vectors, state):
  """Refuses a state that does not fit the model or the statistics."""
  width = 0 if state is None else len(state.origin)
  if env is not None:
    found = tree_paths.flatten(env.obs_spec)
    width = sum(found[name].shape[0] for name in vectors)
    if state is not None and width != len(state.origin):
      raise ValueError(
        f"The environment's state has {width} numbers, {[*vectors]}, and the "
        f'statistics {len(state.origin)}: name the vectors of the data set.'
      )
  if width > config.O:
    raise ValueError(
      f"The environment's state has {width} numbers, and the model has room "
      f'for {config.O}: make O of its config larger.'
    )


def _found(env: env_lib.Env, cameras, vectors, ignored: tuple[str, ...]):
  """Names of the cameras and of the vectors; refuses what does not fit."""
  found = tree_paths.flatten(env.obs_spec)
  images, numbers = [], []
  for name, x in found.items():
    if name in (*ignored, *instructions.NAMES):
      continue
    if x.dtype == jnp.uint8 and len(x.shape) == 3 and x.shape[-1] == 3:
      images.append(name)
    elif jnp.issubdtype(x.dtype, jnp.floating) and len(x.shape) == 1:
      numbers.append(name)
    elif None in (cameras, vectors):
      raise ValueError(
        'π0 reads images, uint8 [rows, columns, 3], and float vectors, '
        f'and the environment returns {name!r}, {x.dtype} {[*x.shape]}: add it '
        'to `ignored` if the policy can do without.'
      )
  for kind, named, known in (
    ('images', cameras, images),
    ('vectors', vectors, numbers),
  ):
    for name in named or ():
      if name not in known:
        raise ValueError(
          f'The environment returns the {kind} {known}, and {name!r} is named: '
          'name those that it has.'
        )
  return (
    tuple(images) if cameras is None else cameras,
    tuple(numbers) if vectors is None else vectors,
  )
