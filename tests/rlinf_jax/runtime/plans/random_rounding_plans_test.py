"""Random steps whose stages round parameters, under random plans.

Rounding where a value is sent, or held, makes the bits that stages would. No
stage here sums, so that every plan computes the bits of the plain step.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import claims
import in_memory
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from planner.lower import passes, rounding, unroll
from rlinf_jax.runtime import local
import stages
import tiny
import toys

KEY = jax.random.key(0)
PLACES = {f'p{i}': plan_lib.Placement((i,)) for i in range(3)}


def fraction(x):
  return x - jnp.floor(x)


def cast(dtype, params):
  return params | {'up_DF': params['up_DF'].astype(dtype)}


def moved(params, x):
  """Rows that depend on all parameters, by exact operations alone."""
  for i in range(3):
    x = fraction(x + params['up_DF'][:, i].astype(x.dtype)[None])
  return fraction(x + params['norm_D'][None])


def in_types(dtypes, params):
  pairs = zip(params, dtypes, strict=True)
  return [cast(dtype, p) if dtype else p for p, dtype in pairs]


def stage(fn, name, dtypes, grain='row'):
  """A stage that rounds each of its leading arguments to a type, or none."""
  return stages.Stage(
    fn,
    name,
    grain,
    unbatched=tuple(range(len(dtypes))),
    rounds={
      i: functools.partial(cast, dtype)
      for i, dtype in enumerate(dtypes)
      if dtype
    },
  )


def reader(name, *dtypes):
  def read(*args):
    for params in in_types(dtypes, args[:-1]):
      args = *args[:-1], moved(params, args[-1])
    return args[-1]

  return stage(read, name, dtypes)


def learner(name, *dtypes):
  def learn(*args):
    params, x = in_types(dtypes, args[:-1]), args[-1]
    step = moved(params[-1], x)
    up, norm = params[0]['up_DF'].astype(x.dtype), params[0]['norm_D']
    up = fraction(up + step[0][:, None] + step[1][:, None])
    return {'up_DF': up, 'norm_D': fraction(norm + step[2])}

  return stage(learn, name, dtypes, 'batch')


HALF = 'bfloat16'
READERS = [
  (reader('act', HALF), 1),
  (reader('score', HALF), 1),
  (reader('judge', None), 1),
  (reader('other', 'float16'), 1),
  (reader('both', HALF, None), 2),
  (reader('halves', HALF, HALF), 2),
]
LEARNERS = [
  (learner('learn', None), 1),
  (learner('mix', None, HALF), 2),
  (learner('distill', HALF), 1),
]


def looped(rng, many):
  """A loop that is given parameters, or carries some and changes them."""
  act, learn = READERS[rng.integers(4)][0], LEARNERS[rng.integers(2)]

  def body(carry, given):
    x, *own = carry
    x = act(given, x)
    if own:
      x = act(own[0], x)
      own = [learn[0](*([own[0]] * learn[1]), x)]
    return (x, *own), None

  return stages.Repeat(body, f'loop{many}', int(rng.integers(1, 4)))


def random_step(seed, n, calls=6):
  """A step of up to so many calls over `n` sets of parameters.

  In every other step, these are older ones each than the one before.
  """

  def step(state, x, key):
    del key
    rng = np.random.default_rng(seed)
    values = [*state]

    def some(count):
      return [values[i] for i in rng.integers(len(values), size=count)]

    for i in range(rng.integers(1, calls) + 1):
      kind = rng.integers(6)
      if kind < 3:
        read, count = READERS[rng.integers(len(READERS))]
        x = read(*some(count), x)
      elif kind < 5:
        learn, count = LEARNERS[rng.integers(len(LEARNERS))]
        values.append(learn(*some(count), x))
      else:
        carry = x, *some(rng.integers(2))
        x, *made = looped(rng, i)(carry, *some(1))
        values += made
    ends = [values[-1], *values[: n - 1]]
    if seed % 2:
      ends = [
        values[[i, rng.integers(len(values))][rng.integers(2)]]
        for i in range(n)
      ]
    return ends, (x, some(rng.integers(2)))

  return step


def random_evaluation(seed, n):
  step = random_step(seed + 10_000, n, 2)

  def evaluate(state, x, key):
    return state, step(state, x, key)[1]

  return evaluate


def random_plan(rng, names):
  chosen = rng.permutation([*PLACES])[: rng.integers(1, 4)].tolist()
  places = {name: PLACES[name] for name in chosen}
  fields = {}
  if len(chosen) > 1 and rng.integers(4) == 0:
    places |= dict.fromkeys(chosen[:2], plan_lib.Placement((3,)))
    fields['shared_devices'] = tuple(chosen[:2])
  learners = [stage.name for stage, _ in LEARNERS if stage.name in names]
  return plan_lib.Plan(
    places,
    {name: chosen[rng.integers(len(chosen))] for name in names},
    pieces=int(rng.choice([1, 1, 2])),
    offload=tuple(name for name in learners if rng.integers(3) == 0),
    **fields,
  )


def rows(i):
  return np.random.default_rng(i).random((8, 4), np.float32)


def first_state(n):
  rng = np.random.default_rng(0)
  return [
    {
      'up_DF': jnp.asarray(rng.random((4, 3), np.float32)),
      'norm_D': jnp.asarray(rng.random(4, np.float32)),
    }
    for _ in range(n)
  ]


def run(plan, flows, state, times):
  """Results of some steps and evaluations under a plan, and the last state."""
  step, evaluate = flows
  runtime = local.LocalRuntime(plan, step=step, evaluate=evaluate)
  in_memory.start(runtime, state)
  results = []
  for i in times:
    results.append(jax.tree.map(np.array, runtime.step(rows(i), KEY)))
    results.append(jax.tree.map(np.array, runtime.evaluate(rows(100 + i), KEY)))
  state = jax.device_get(in_memory.state(runtime))
  check_held(runtime, plan, flows)
  runtime.close()
  return results, state


def check_held(runtime, plan, flows):
  """The planner counts values in the types in which places hold them."""
  step = unroll.unroll(rounding.with_readers(*flows))
  planned = rounding.held(step, plan)
  for name, interpreter in runtime.interpreters.items():
    for i, x in interpreter.state.items():
      start, _ = step.carry[i]
      v = planned[name].get(start, start)
      assert step.values[v].dtype == x.dtype


def plain(seed, n, times):
  """The same, called with arrays."""
  step, evaluate = random_step(seed, n), random_evaluation(seed, n)
  state, results = first_state(n), []
  for i in times:
    state, info = step(state, rows(i), KEY)
    results.append(jax.tree.map(np.array, info))
    _, info = evaluate(state, rows(100 + i), KEY)
    results.append(jax.tree.map(np.array, info))
  return results, state


@functools.cache
def traced(seed, n):
  return [
    flow_lib.trace(fn(seed, n), first_state(n), rows(0), KEY)
    for fn in (random_step, random_evaluation)
  ]


def check(seed):
  """Runs a random step under a plan, and goes on under another one."""
  rng = np.random.default_rng(seed)
  n = int(rng.integers(1, 5))
  flows = traced(seed, n)
  names = dict.fromkeys(name for flow in flows for name in flow.stages)
  plans = [random_plan(rng, names) for _ in range(2)]
  plans = [passes.with_order(flows[0], p, toys.Random(seed)) for p in plans]
  want, _ = plain(seed, n, range(4))
  got, state = run(plans[0], flows, first_state(n), range(2))
  tiny.assert_same_bits(got, want[:4])
  got, _ = run(plans[1], flows, state, range(2, 4))
  tiny.assert_same_bits(got, want[4:])


@pytest.mark.slow
@pytest.mark.parametrize('seed', claims.some(range(120, 240), [153, 210]))
def test_no_plan_changes_what_stages_that_round_compute(seed):
  check(seed)
