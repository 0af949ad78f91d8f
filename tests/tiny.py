"""The smallest model, task and places that the tests share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from planner import flow as flow_lib
from planner import graph as graph_lib
from planner import plan as plan_lib
from rlinf_jax import train
from stages import base, language
from stages import stage as stages
from stages.models import transformer

CONFIG = transformer.Config(
  V=16, D=32, L=2, H=4, K=2, W=8, F=64, initializer=0.3
)
LENGTH = 6
PLACES = {
  'one': plan_lib.Placement(),
  'data': plan_lib.Placement(tuple(range(8)), (('data', 8),)),
  'fsdp': plan_lib.Placement(tuple(range(8)), (('fsdp', 8),)),
  'mixed': plan_lib.Placement(
    tuple(range(8)), (('data', 2), ('fsdp', 2), ('tensor', 2))
  ),
}


def policy(dtype='float32', length=LENGTH, **kwargs) -> base.Policy:
  """A policy of two layers, whose token 0 ends a row."""
  config = dataclasses.replace(CONFIG, dtype=dtype)
  return language.policy(config, length=length, stop=(0,), **kwargs)


@stages.stage('reward')
def even(answer, action, mask):
  """Rewards the share of even tokens."""
  del answer
  share = ((action % 2 == 0) * mask).sum(1) / jnp.maximum(mask.sum(1), 1)
  return base.Verdict(share, (share > 0.5).astype(share.dtype))


def _even_on_host(answer, action, mask):
  share = ((action % 2 == 0) * mask).sum(1) / np.maximum(mask.sum(1), 1)
  share = share.astype(np.float32)
  return base.Verdict(share, (share > 0.5).astype(np.float32))


def _row_of_each(answer, action, mask):
  del answer, mask
  row = jax.ShapeDtypeStruct(action.shape[:1], jnp.float32)
  return base.Verdict(row, row)


even_on_host = stages.Stage(
  _even_on_host, 'reward', host=True, like=_row_of_each
)


def problem(rows=8, columns=5, seed=0) -> base.Problem:
  """Prompts of different lengths, padded on the left."""
  rng = np.random.default_rng(seed)
  length_B = rng.integers(1, columns + 1, rows)
  mask_BP = np.arange(columns)[None] >= columns - length_B[:, None]
  token_BP = rng.integers(1, CONFIG.V, (rows, columns), np.int32)
  return base.Problem(
    base.Prompt(token_BP, mask_BP.astype(np.int32)),
    np.arange(rows, dtype=np.int32),
  )


def examples(rows=8, columns=5, seed=0) -> base.Example:
  """Completions that repeat the last token of the prompt, then end."""
  prompt = problem(rows, columns, seed).prompt
  rng = np.random.default_rng(seed)
  length_B = rng.integers(2, LENGTH + 1, rows)
  last_B1, place_1T = length_B[:, None] - 1, np.arange(LENGTH)[None]
  action_BT = np.where(place_1T < last_B1, prompt.token[:, -1:], 0)
  mask_BT = (place_1T <= last_B1).astype(np.float32)
  return base.Example(prompt, action_BT.astype(np.int32), mask_BT)


def trace(workflow: base.Workflow, batch) -> graph_lib.Flow:
  """The flow of a workflow's step."""
  key = jax.random.key(0)
  begin = functools.partial(train.first_state, workflow, batch=batch)
  return flow_lib.trace(workflow.step, jax.eval_shape(begin, key), batch, key)


def trace_evaluation(workflow: base.Workflow, batch) -> graph_lib.Flow:
  """The flow of a workflow's evaluation, which carries its state unchanged."""
  key = jax.random.key(0)
  return flow_lib.trace(
    lambda state, *inputs: (state, workflow.evaluate(state, *inputs)),
    jax.eval_shape(workflow.init, key),
    batch,
    key,
  )


def _sum(x):
  """A sum over rows, in the shape that all values of a random step have."""
  return jnp.full(4, x.sum())


ROUTED = [
  stages.Stage(lambda x: (jnp.sin(x), jnp.cos(x)), 'turn', 'batch'),
  stages.Stage(lambda x, y: x - y, 'differ'),
  stages.Stage(
    lambda x, y: (_sum(jnp.sin(x + 0.5 * y)), _sum(jnp.cos(x * y))),
    'add',
    'sum',
  ),
  stages.Stage(lambda x: _sum(jnp.tanh(2 * x)), 'squash', 'sum'),
  stages.Stage(
    lambda y, x: (
      x[jnp.where(y[0] > 0, jnp.array([2, 0, 3, 1]), jnp.array([3, 2, 1, 0]))],
    ),
    'shuffle',
    'slice',
    whole=(0,),
  ),
]


def random_step(seed):
  """A step that routes at random; what it keeps may be unread or repeated."""

  def step(state, batch, key):
    del key
    rng = np.random.default_rng(seed)
    values = [*state, *batch]
    for _ in range(rng.integers(1, 8)):
      stage = ROUTED[rng.integers(len(ROUTED))]
      n = stage.fn.__code__.co_argcount
      made = stage(*(values[i] for i in rng.integers(len(values), size=n)))
      values += made if isinstance(made, tuple) else [made]
    pick = rng.integers(len(values), size=len(state) + rng.integers(4))
    made = [values[i] for i in pick]
    return made[: len(state)], made[len(state) :]

  return step


class Copies(dict):
  """Arrays by name."""


def arrays(tree) -> Copies:
  """Copies of the arrays of a tree by name; keys as their bits."""

  def host(x):
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      x = jax.random.key_data(x)
    return np.array(x)  # A view would keep memory from being used again.

  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return Copies((jax.tree_util.keystr(path), host(x)) for path, x in leaves)


def assert_same_bits(got, want):
  """Asserts that two trees of arrays do not differ in a single bit."""
  got, want = (
    tree if isinstance(tree, Copies) else arrays(tree) for tree in (got, want)
  )
  assert got.keys() == want.keys()
  for name in want:
    assert got[name].dtype == want[name].dtype, name
    np.testing.assert_array_equal(got[name], want[name], err_msg=name)
