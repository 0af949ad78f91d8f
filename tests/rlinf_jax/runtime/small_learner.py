"""A small learner for tests: parameters move towards rewarded rows."""

import jax
import jax.numpy as jnp
import numpy as np

import in_memory
from planner.ir import flow, plan
from rlinf_jax.runtime import local
import stages


@stages.stage('learn', 'sum', unbatched=(0,))
def learn(state, x, reward):
  gap = x - state['w']
  return {'w': (reward[:, None] * gap).sum(0, keepdims=True)}


@stages.stage('apply', 'batch')
def apply(state, gradient):
  m = 0.9 * state['m'] + gradient['w']
  return {'w': state['w'] + 0.1 * m, 'm': m}


def judge(fn, like=lambda x: jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)):
  return stages.Stage(fn, 'judge', host=True, out_shapes=like)


def first_column(x):
  return x[:, 0] + np.float32(0)


def learner(judge):
  def step(state, x, key):
    del key
    reward = judge(x)
    return apply(state, learn(state, x, reward)), {'reward': reward}

  return step


def ready(step, state=None, batch=None, **kwargs):
  """A runtime of a step, with its state loaded."""
  state = STATE if state is None else state
  graph = flow.trace(step, state, BATCH if batch is None else batch, KEY)
  planned = local.LocalRuntime(
    plan.one_place(graph.stages, **kwargs), step=graph
  )
  in_memory.start(planned, state)
  return planned


KEY = jax.random.key(0)
STATE = {'w': jnp.zeros((1, 512)), 'm': jnp.ones((1, 512))}
BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(8, 512)), jnp.float32)
