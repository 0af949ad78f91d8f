"""Toy simulators that count, their actions and their faults."""

import numpy as np

TOY = 'env_toys:toys/Count-v0'
RAISE, KILL, HANG, NAN, BAD_RESET, HANG_RESET = 10, 20, 30, 40, 50, 60
KILL_AGAIN, WIN = 70, -11


def act(pool, token, *numbers):
  return pool.step(token, np.array(numbers, np.float32)[:, None])


def actions(T, B, A=1):
  rng = np.random.default_rng(0)
  action_TBA = rng.uniform(-1, 1, (T, B, A)).astype(np.float32)
  action_TBA[rng.random((T, B)) < 0.1] = WIN
  return action_TBA
