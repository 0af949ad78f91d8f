"""Toy simulators that count, their actions and their faults."""

import numpy as np

from rlinf_jax.envs import simulator

TOY = 'env_toys:toys/Count-v0'
RAISE, KILL, HANG, NAN, BAD_RESET, HANG_RESET = 10, 20, 30, 40, 50, 60
KILL_AGAIN, OVERPAID, START, WIN = 70, 80, 90, -11


def act(pool, token, *numbers):
  return pool.step(token, np.array(numbers, np.float32)[:, None])


def actions(T, B, A=1):
  rng = np.random.default_rng(0)
  action_TBA = rng.uniform(-1, 1, (T, B, A)).astype(np.float32)
  action_TBA[rng.random((T, B)) < 0.1] = WIN
  return action_TBA


class Watched:
  """A simulator whose reward is how often it was looked at in its episode.

  An action of 10 raises, and one of 40 makes a picture that cannot be drawn.
  """

  spec = simulator.Spec(
    obs=simulator.Array((2,), 'float32'),
    low=np.full(1, -100, np.float32),
    high=np.full(1, 100, np.float32),
    horizon=6,
  )

  def reset(self, seed):
    self.seed, self.time, self.looks = seed, 0, 0
    return self._look()

  def step(self, action_A):
    step = self.advance(action_A)
    if action_A[0] == NAN:
      raise RuntimeError('the screen is black')
    return step._replace(obs=self._look() if step.obs is None else step.obs)

  def advance(self, action_A):
    if action_A[0] == RAISE:
      raise RuntimeError('the physics exploded')
    self.time += 1
    reward, won = float(self.looks), bool(action_A[0] == WIN)
    truncated = self.time == self.spec.horizon
    obs = self._look() if won or truncated else None
    return simulator.Step(obs, reward, won, truncated, won)

  def close(self):
    pass

  def _look(self):
    self.looks += 1
    return np.array([self.seed, self.time], np.float32)


def watched(index):
  return Watched()
