"""Environments for tests of worlds: they count, and fail when they are told."""

import os
import pathlib
import signal
import time

import gymnasium
import numpy as np

HORIZON = 7


class Count(gymnasium.Env):
  """Counts steps and sums actions; what it shows follows from its seed.

  An action of at least 10 is a fault: 10 raises, 20 kills the process, 30
  hangs, 40 shows NaN, 50 makes the next `reset` raise, 60 makes it hang, 70
  kills the process if it is done again. One below −10 ends the episode with
  success.
  """

  observation_space = gymnasium.spaces.Box(-1e6, 1e6, (4,), np.float32)
  action_space = gymnasium.spaces.Box(-100, 100, (1,), np.float32)

  def __init__(self):
    self.bad = 0

  def _obs(self):
    noise = self.np_random.normal()
    return np.array([self.seed, self.time, self.sum, noise], np.float32)

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    bad, self.bad = self.bad, 0
    if bad == 50:
      raise RuntimeError('the arm is not there')
    if bad == 60:
      time.sleep(1e6)
    self.seed, self.time, self.sum = seed % 1000, 0, 0.0
    return self._obs(), {}

  def step(self, action):
    (do,) = action
    if do == 10:
      raise RuntimeError('the physics exploded')
    if do == 20:
      os.kill(os.getpid(), signal.SIGKILL)
    if do == 70:
      before = pathlib.Path(os.environ['TOYS_MARK'])
      if before.exists():
        os.kill(os.getpid(), signal.SIGKILL)
      before.touch()
    if do == 30:
      time.sleep(1e6)
    if do in (50, 60):
      self.bad = int(do)
    self.time += 1
    self.sum += float(do)
    obs = self._obs()
    if do == 40:
      obs[2] = np.nan
    done = do < -10 or do in (50, 60)
    return obs, float(do), bool(done), False, {'success': bool(do < -10)}


class Again(Count):
  """Begins further episodes by a seed that its first one leads to."""

  def reset(self, *, seed=None, options=None):
    if seed is None:
      seed = int(self.np_random.integers(1000))
    return super().reset(seed=seed)


class See(Count):
  """The same with a picture, whose brightness is seed and time."""

  observation_space = gymnasium.spaces.Dict(
    {
      'state': gymnasium.spaces.Box(-1e6, 1e6, (2, 2), np.float64),
      'eye': gymnasium.spaces.Dict(
        {'front': gymnasium.spaces.Box(0, 255, (4, 6, 3), np.uint8)}
      ),
    }
  )

  def _obs(self):
    bright = (self.seed + self.time) % 256
    picture = np.full((4, 6, 3), bright, np.uint8)
    return {
      'state': np.ones((2, 2)) * self.time,
      'eye': {'front': picture},
    }


class Drawn(Count):
  """Can be drawn: its picture is seed, time and what was summed, in a square.

  Where it shall fail in that, it does after three steps: by 'raise', 'kill' or
  'hang'.
  """

  metadata = {'render_modes': ['rgb_array']}

  def __init__(self, render_mode=None, fails=''):
    super().__init__()
    self.render_mode, self.fails = render_mode, fails

  def render(self):
    if self.time == 3 and self.fails:
      if self.fails == 'raise':
        raise RuntimeError('the screen is black')
      if self.fails == 'kill':
        os.kill(os.getpid(), signal.SIGKILL)
      time.sleep(1e6)
    told = self.seed % 256, self.time, int(abs(self.sum) * 100) % 256
    return np.tile(np.array(told, np.uint8), (4, 6, 1))


gymnasium.register(
  'toys/Drawn-v0', entry_point=Drawn, max_episode_steps=HORIZON
)
gymnasium.register(
  'toys/Again-v0', entry_point=Again, max_episode_steps=HORIZON
)
gymnasium.register('toys/See-v0', entry_point=See, max_episode_steps=HORIZON)
gymnasium.register(
  'toys/Count-v0', entry_point=Count, max_episode_steps=HORIZON
)


class Fragile(Count):
  """Kills its process at its third step, unless it has left its mark before."""

  def __init__(self, mark):
    super().__init__()
    self.mark, self.steps = pathlib.Path(mark), 0

  def step(self, action):
    self.steps += 1
    if self.steps == 3 and not self.mark.exists():
      self.mark.touch()
      os.kill(os.getpid(), signal.SIGKILL)
    return super().step(action)


gymnasium.register(
  'toys/Fragile-v0', entry_point=Fragile, max_episode_steps=HORIZON
)
