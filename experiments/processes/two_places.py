"""A learner and an actor in processes, with a state of any size."""

import jax
import jax.numpy as jnp
import numpy as np

from planner.ir import flow as flow_lib
import stages

LEAVES = 16  # Of the parameters.
BYTES = 3 * 4  # Of a parameter and its two moments.
PLAN = {
  'places': {'actor': {'devices': [0]}, 'learner': {'devices': [1]}},
  'stages': {'act': 'actor', '*': 'learner'},
}
KEY = jax.random.key(0)


class Initial:
  """Makes the first state, in any process.

  Attributes:
    size: elements of each of the `LEAVES` parameters.
  """

  def __init__(self, size: int):
    self.size = size

  def __call__(self):
    keys = jax.random.split(KEY, LEAVES)
    params = {
      str(i): jax.random.normal(k, (self.size,)) for i, k in enumerate(keys)
    }
    return params, *(jax.tree.map(jnp.zeros_like, params) for _ in range(2))


@stages.stage('act', 'row', unbatched=(0,))
def act(params, x):
  return x + sum(w[0] for w in params.values())


@stages.stage('learn', 'batch')
def learn(state, x):
  params, first, second = state
  first = jax.tree.map(lambda m, w: 0.9 * m + 0.1 * w, first, params)
  second = jax.tree.map(lambda v, w: 0.9 * v + 0.1 * w**2, second, params)
  params = jax.tree.map(lambda w, m: w - 0.01 * m, params, first)
  return (params, first, second), x.sum()


class Flows:
  """Records the flow of a step, in any process.

  Attributes:
    initial: makes the first state.
  """

  def __init__(self, initial: Initial):
    self.initial = initial

  def __call__(self):
    step = lambda state, x, key: learn(state, act(state[0], x))
    shapes = jax.eval_shape(self.initial)
    return flow_lib.trace(step, shapes, np.zeros(4, np.float32), KEY), None
