"""What a person sees of an evaluation: some episodes, picture by picture.

They are of the very episodes that are judged. Where a world is JAX, its rollout
keeps the states that it came through, and they are drawn when it has ended; a
simulator can be drawn while it is there and never again, so its pictures are
taken on the way and fetched at the end.
"""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp
import numpy as np

import stages
from stages import base, metrics
from stages.envs import rollout

EPISODES = 4  # The first of an evaluation.
PICTURES = 30  # Of an episode, at most, beside its beginning.
NAME = 'eval/video'


def with_recorder(world: base.Env) -> base.Env:
  """The same world, in which cameras run where it needs any."""
  if world.recorder is None:
    return world
  begin = functools.partial(
    world.recorder.init, rows=EPISODES, every=_every(world.horizon)
  )
  return world._replace(init=begin)


def video_stage(world: base.Env) -> Callable:
  """Returns `state, seed_B, timestep -> info`, what is to be seen, if anything.

  The state is the one after the last step, and is used up; `timestep` is of the
  `world.horizon` steps since episodes began. Of each of the first episodes
  there is a `frame` every few steps, and its last one up to the end of all:

    seed: int32 [B].
    time: steps made before each frame, int32 [B, n].
    success: whether the task was solved at that moment, [B, n].
    solved: whether it ever was, [B].
    shown: one where there are pictures, [B].
    frame: uint8 [B, n, height, width, 3].
  """
  if world.recorder:
    fetch = functools.partial(_fetched, world.recorder)
    like = functools.partial(_promised, world.recorder)
    return stages.Stage(
      fetch, 'video', 'sum', consumes=(0,), host=True, out_shapes=like
    )
  if world.render:
    drawn = stages.Stage(functools.partial(_drawn, world), 'video', 'sum')
    return lambda state, seed, timestep: drawn(seed, timestep)
  return lambda state, seed, timestep: {}


def _drawn(world: base.Env, seed, timestep: base.TimeStep) -> base.Info:
  """Draws the states that a rollout has kept."""
  if timestep.final_state is None:
    raise ValueError(
      'This world can be drawn, but its timesteps have no `final_state`, and '
      'without it nobody sees how an episode ends: give them one, or leave out '
      '`render`.'
    )
  first, _ = world.init(seed[:EPISODES])
  place = jax.tree.map(
    lambda x, y: jnp.concatenate([x[:, None], y[:EPISODES]], 1),
    *(first, timestep.final_state),
  )
  told = _told(seed, timestep)
  pick = jax.vmap(lambda row, at: row[at])
  place = jax.tree.map(lambda x: pick(x, told['time']), place)
  frame = jax.lax.map(world.render, place)  # An episode at a time.
  return _shown(jnp, told, jnp.ones_like(told['solved']), frame)


def _fetched(recorder, state, seed, timestep: base.TimeStep) -> base.Info:
  """Fetches what a simulator's recorder has filmed."""
  told = _told(seed, timestep)
  told = {name: np.asarray(x) for name, x in told.items()}
  token = state.token if isinstance(state, rollout.Saved) else state
  frame, shown_B = recorder.frames(token[:EPISODES], told['time'])
  return _shown(np, told, shown_B, frame)


def _promised(recorder, state, seed, timestep) -> base.Info:
  """Shapes of what `_fetched` returns."""
  del state

  def shapes(seed, timestep):
    told = _told(seed, timestep)
    frame = jnp.zeros((*told['time'].shape, *recorder.shape), jnp.uint8)
    return _shown(jnp, told, told['solved'], frame)

  return jax.eval_shape(shapes, seed, timestep)


def _shown(numpy, told, shown_B, frame) -> base.Info:
  """The same number of episodes always, of which some are nothing to see.

  A piece of a batch may have fewer rows, and its sums the shape of all others.
  """

  def filled(x):
    rest = [(0, EPISODES - len(x)), *[(0, 0)] * (x.ndim - 1)]
    return numpy.pad(x, rest)

  film = told | {'shown': shown_B, 'frame': frame}
  return {NAME: metrics.FirstRows(jax.tree.map(filled, film))}


def _told(seed, timestep: base.TimeStep) -> dict:
  """What goes with pictures; of JAX or NumPy, as it is given."""
  done_BT = (timestep.terminated + timestep.truncated)[:EPISODES] > 0
  success_BT = timestep.success[:EPISODES]
  T = done_BT.shape[1]
  # Steps up to the end of the first episode, that step included.
  end_B = ((done_BT.cumsum(1) - done_BT) == 0).sum(1)
  every = _every(T)
  due = np.arange(-(-T // every) + 1)[None] * every
  late = due >= end_B[:, None]
  time = late * end_B[:, None] + ~late * due
  after = time[:, :, None] == np.arange(1, T + 1)[None, None]
  before_BT = np.arange(T)[None] < end_B[:, None]
  return {
    'seed': seed[:EPISODES],
    'time': time.astype(np.int32),
    'success': (after * success_BT[:, None]).sum(2),
    'solved': (before_BT * success_BT).max(1),
  }


def _every(T: int) -> int:
  """Steps between pictures of T."""
  return -(-T // PICTURES)
