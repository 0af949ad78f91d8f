"""Loops for tests: one of four stages, and random ones of random stages."""

import jax.numpy as jnp
import numpy as np

from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
import stages
from stages import repeat
import tiny


@stages.stage('count', 'batch')
def count(n, most):
  """Increments a counter; whether it has reached `most`."""
  return n + 1, n + 1 >= most


@stages.stage('zero', 'batch')
def zero(like):
  return jnp.zeros_like(like)


@stages.stage('halve')
def halve(x_B):
  return x_B / 2


@stages.stage('weigh', 'sum')
def weigh(x_B):
  return x_B.sum()


@stages.stage('grow', 'batch')
def grow(x_B, sum_):
  return x_B + sum_[None]


def counted(carry, most):
  """Halves, then adds the sum, for `most` rounds."""
  n, x_B = carry
  x_B = halve(x_B)
  x_B = grow(x_B, weigh(x_B))
  n, done = count(n, most)
  return (n, x_B), done


LOOP = repeat.Repeat(counted, 'loop', at_most=5)


def step(state, inputs):
  x_B, most = inputs
  n, x_B = LOOP((zero(most), grow(x_B, state)), most)
  return weigh(halve(x_B)), n


def inputs(most=3):
  return jnp.arange(8.0), jnp.int32(most)


def trace(fn=step, state=None, given=None):
  state = jnp.ones(()) if state is None else state
  return flow_lib.trace(fn, state, inputs() if given is None else given)


def body(fn, *given):
  loop = repeat.Repeat(fn, 'loop', at_most=2)
  return lambda state, x: (state, loop(x, *given))


def random_loop(seed, depth=1):
  """A step that routes values at random, with loops nested `depth` deep."""

  def route(rng, values, depth, most):
    for _ in range(rng.integers(1, 5)):
      stage = tiny.ROUTED[rng.integers(len(tiny.ROUTED))]
      n = stage.fn.__code__.co_argcount
      new = stage(*(values[i] for i in rng.integers(len(values), size=n)))
      values += new if isinstance(new, tuple) else [new]
    if depth:
      values += loop(rng, values, depth - 1, most)
    return values

  def loop(rng, values, depth, most):
    inner, width = int(rng.integers(2**31)), int(rng.integers(1, 4))
    static = bool(rng.integers(2))

    def turn(carry, most, *given):
      n, *own = carry
      again = np.random.default_rng(inner)
      some = route(again, [*own, *given], depth, most)
      ends = [
        tiny.ROUTED[1](some[i], some[j])
        for i, j in again.integers(len(some), size=(width, 2))
      ]
      if again.integers(2):
        ends[0] = own[-1]  # The value of an earlier round.
      n, done = count(n, most)
      return (n, *ends), None if static else done

    pick = rng.integers(len(values), size=width + rng.integers(3))
    carry = zero(most), *(values[i] for i in pick[:width])
    outputs = repeat.Repeat(turn, f'loop {depth}', int(rng.integers(1, 4)))(
      carry, most, *(values[i] for i in pick[width:])
    )
    return list(outputs[1:])

  def step(state, batch, most):
    rng = np.random.default_rng(seed)
    values = route(rng, [*state, *batch], depth, most)
    values = route(rng, values, 0, most)
    pick = rng.integers(len(values), size=len(state) + rng.integers(4))
    chosen = [values[i] for i in pick]
    return chosen[: len(state)], chosen[len(state) :]

  return step


def random_rows(rng, n):
  return [jnp.asarray(rng.normal(size=4)) for _ in range(n)]


def random_case(seed):
  rng = np.random.default_rng(seed)
  state, batch = (
    random_rows(rng, rng.integers(1, 4)),
    random_rows(rng, rng.integers(1, 3)),
  )
  fn = random_loop(seed, depth=1 + seed % 2)
  flow = flow_lib.trace(fn, state, batch, jnp.int32(2))
  n = int(rng.integers(1, 4))
  plan = plan_lib.Plan(
    {f'p{i}': plan_lib.Placement((i,)) for i in range(n)},
    {name: f'p{rng.integers(n)}' for name in flow.stages},
    pieces=int(rng.choice([1, 2, 4])),
    offload=tuple(name for name in flow.stages if rng.random() < 0.2),
  )
  return fn, flow, plan, state, batch
