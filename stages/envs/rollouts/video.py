"""Videos of an evaluation: frames of its first episodes.

They show the very episodes that are scored. In a JAX environment the rollout
keeps its states, which are rendered afterwards. A simulator can only be
rendered while it runs: its frames are recorded on the way and fetched at the
end.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import stages
from stages import base, metrics
from stages.envs import env as env_lib
from stages.envs import episode_stats
from stages.envs.rollouts import rollout

EPISODES = 4  # The first of an evaluation.
FRAMES = 30  # Of an episode at most, beside its first.
NAME = 'eval/video'


class VideoRecorder(NamedTuple):
  """Recording of a simulator, which can only be rendered while it runs.

  Attributes:
    init: `seed_B, rows=…, every=… -> state, obs`: resets as `Env.init` does,
      and records the first episode of each of the first `rows` environments:
      its first frame, one frame every `every` steps, and its last.
    frames: `state, time -> frame, shown_B`: recorded frames at the given step
      counts, int32 [B, n]: uint8 [B, n, *shape], and 1 where all are available.
    shape: height, width and 3 color channels of a frame.
  """

  init: Callable[..., tuple[Any, Any]]
  frames: Callable[[Any, Any], tuple[Any, Any]]
  shape: tuple[int, int, int]


def with_recorder(env: env_lib.Env) -> env_lib.Env:
  """The environment with recording on, if it is a simulator that renders."""
  if env.recorder is None:
    return env
  init = functools.partial(
    env.recorder.init, rows=EPISODES, every=_stride(env.horizon)
  )
  return env._replace(init=init)


def video_stage(env: env_lib.Env) -> Callable:
  """Returns `state, seed_B, timestep -> info` with the video; {} without one.

  The state is the one after the last step, and is consumed; `timestep` holds
  the `env.horizon` steps since episodes began. The video has a frame every few
  steps of each of the first episodes, and repeats the last frame up to the end:

    seed: int32 [B].
    time: steps before each frame, int32 [B, n].
    success: 1 where the task was solved at that moment, [B, n].
    solved: 1 where it ever was, [B].
    shown: 1 where frames are available, [B].
    frame: uint8 [B, n, height, width, 3].
  """
  if env.recorder:
    fetch = functools.partial(_fetch, env.recorder)
    shapes = functools.partial(_fetch_shapes, env.recorder)
    return stages.Stage(
      fetch, 'video', 'sum', consumes=(0,), host=True, out_shapes=shapes
    )
  if env.render:
    render = stages.Stage(functools.partial(_render, env), 'video', 'sum')
    return lambda state, seed, timestep: render(seed, timestep)
  return lambda state, seed, timestep: {}


def _render(env: env_lib.Env, seed, timestep: env_lib.TimeStep) -> base.Info:
  """Renders the states that a rollout has kept."""
  if timestep.final_state is None:
    raise ValueError(
      'This environment has `render`, but its time steps have no '
      '`final_state`, without which the end of an episode cannot be rendered: '
      'return `final_state`, or leave out `render`.'
    )
  first, _ = env.init(seed[:EPISODES])
  state = jax.tree.map(
    lambda x, y: jnp.concatenate([x[:, None], y[:EPISODES]], 1),
    first,
    timestep.final_state,
  )
  captions = _captions(seed, timestep)
  pick = jax.vmap(lambda row, at: row[at])
  state = jax.tree.map(lambda x: pick(x, captions['time']), state)
  frame = jax.lax.map(env.render, state)  # An episode at a time.
  return _video(jnp, captions, jnp.ones_like(captions['solved']), frame)


def _fetch(
  recorder: VideoRecorder, state, seed, timestep: env_lib.TimeStep
) -> base.Info:
  """Fetches the frames that a simulator has recorded."""
  captions = _captions(seed, timestep)
  captions = {name: np.asarray(x) for name, x in captions.items()}
  token = state.token if isinstance(state, rollout.Saved) else state
  frame, shown_B = recorder.frames(token[:EPISODES], captions['time'])
  return _video(np, captions, shown_B, frame)


def _fetch_shapes(recorder: VideoRecorder, state, seed, timestep) -> base.Info:
  """Shapes of what `_fetch` returns."""
  del state

  def shapes(seed, timestep):
    captions = _captions(seed, timestep)
    shape = (*captions['time'].shape, *recorder.shape)
    frame = jnp.zeros(shape, jnp.uint8)
    return _video(jnp, captions, captions['solved'], frame)

  return jax.eval_shape(shapes, seed, timestep)


def _video(numpy, captions, shown_B, frame) -> base.Info:
  """The video as a metric, padded with empty episodes to EPISODES rows.

  A piece of a batch may have fewer rows, and the sums of all pieces must have
  one shape.
  """

  def pad(x):
    widths = [(0, EPISODES - len(x)), *[(0, 0)] * (x.ndim - 1)]
    return numpy.pad(x, widths)

  video = captions | {'shown': shown_B, 'frame': frame}
  return {NAME: metrics.FirstRows(jax.tree.map(pad, video))}


def _captions(seed, timestep: env_lib.TimeStep) -> dict:
  """Seeds, times and success of the frames, in JAX or NumPy as given."""
  done_BT = (timestep.terminated + timestep.truncated)[:EPISODES] > 0
  success_BT = timestep.success[:EPISODES]
  solved_BT = episode_stats.succeeded(timestep)[:EPISODES]
  T = done_BT.shape[1]
  # Steps up to and including the last of the first episode.
  end_B = ((done_BT.cumsum(1) - done_BT) == 0).sum(1)
  stride = _stride(T)
  due = np.arange(-(-T // stride) + 1)[None] * stride
  late = due >= end_B[:, None]
  time = late * end_B[:, None] + ~late * due
  after = time[:, :, None] == np.arange(1, T + 1)[None, None]
  before_BT = np.arange(T)[None] < end_B[:, None]
  return {
    'seed': seed[:EPISODES],
    'time': time.astype(np.int32),
    'success': (after * success_BT[:, None]).sum(2),
    'solved': (before_BT * solved_BT).max(1),
  }


def _stride(T: int) -> int:
  """Steps between frames of an episode of T steps."""
  return -(-T // FRAMES)
