"""Places that share a device hold it one at a time, and change no bit."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import claims
import in_memory
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import base, interpreter, local
from rlinf_jax.runtime.places import lease as lease_lib
from sharding import offload
import stages
from stages import workflows
from stages.learn import optimizers
import tiny

ACTING = dict.fromkeys(('keys', 'repeat', 'generate', 'round_prompts'), 'actor')
BOTH = {'actor': {'devices': [0]}, 'learner': {'devices': [0]}}
SHARE = ['learner', 'actor']


def grpo(staleness=0):
  return workflows.grpo(
    tiny.policy(),
    tiny.even_on_host,
    optimizers.adamw(1e-2),
    group_size=4,
    kl_coef=0.1,
    staleness=staleness,
  )


def dapo():
  return workflows.dapo(
    tiny.policy(),
    tiny.even_on_host,
    optimizers.adamw(1e-2),
    group_size=4,
    max_rounds=2,
  )


def planned(workflow, shared, **fields):
  """A runtime of two places that share a device, or of a single place."""
  step = tiny.trace(workflow, tiny.problem())
  evaluate = tiny.trace_evaluation(workflow, tiny.problem(4))
  names = dict.fromkeys((*step.stages, *evaluate.stages))
  where = {name: ACTING.get(name, 'learner') for name in names}
  sketch = {'places': BOTH, 'stages': where, 'shared_devices': SHARE}
  if not shared:
    sketch = {'stages': dict.fromkeys(names, 'all')}
  plan = plan_lib.parse(sketch | fields)
  return local.LocalRuntime(plan, step=step, evaluate=evaluate)


def run(runtime, workflow, steps=3):
  in_memory.start(runtime, workflow.init(jax.random.key(0)))
  infos = [runtime.evaluate(tiny.problem(4), jax.random.key(9))]
  submitted = [
    runtime.submit(tiny.problem(seed=i), jax.random.key(i))
    for i in range(steps)
  ]
  infos += [info.result() for info in submitted]
  runtime.wait()
  return jax.device_get(infos), tiny.arrays(in_memory.state(runtime))


IN_PIECES = 2, ('apply', 'ref_logp')
# A workflow, pieces and offloads.
SHARED = {
  'grpo': (grpo, 1, ()),
  'in pieces, with offloads': (grpo, *IN_PIECES),
  'a step late': (functools.partial(grpo, 1), 1, ()),
  'a step late, in pieces, with offloads': (
    functools.partial(grpo, 1),
    *IN_PIECES,
  ),
  'in a loop': (dapo, 1, ()),
}


@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  claims.some(SHARED, ['a step late, in pieces, with offloads', 'in a loop']),
)
def test_sharing_a_device_changes_no_bit(name):
  make, pieces, offload = SHARED[name]
  workflow = make()
  fields = {'pieces': pieces, 'offload': offload}
  both, one = (planned(workflow, shared, **fields) for shared in (True, False))
  got, want = run(both, workflow), run(one, workflow)
  tiny.assert_same_bits(got[0], want[0])
  tiny.assert_same_bits(got[1], want[1])
  assert not any(place.lease.held for place in both.places.values())
  runs = sorted(
    (s.start, s.end, s.place) for s in both.timeline.take() if s.what == 'run'
  )
  assert {place for *_, place in runs} == {*BOTH}
  assert all(a[1] <= b[0] for a, b in zip(runs, runs[1:], strict=False))
  both.close()
  one.close()


@pytest.mark.usefixtures('in_float64')
def test_two_meshes_take_turns_on_the_same_devices():
  workflow, devices = grpo(), [0, 1]
  sharded = {'devices': devices, 'axes': [['fsdp', 2]]}
  copied = {'devices': devices, 'axes': [['data', 2]]}
  both = planned(workflow, True, places={'actor': copied, 'learner': sharded})
  one = planned(workflow, False, places={'all': sharded})
  got, want = run(both, workflow), run(one, workflow)
  (_, state), (_, expected) = got, want
  assert state.keys() == expected.keys()
  for name in expected:
    np.testing.assert_allclose(
      state[name], expected[name], rtol=1e-8, atol=1e-12
    )
  # Parameters are sharded by the learner alone.
  meshes = {name: place.mesh.shape for name, place in both.places.items()}
  assert meshes['actor'] != meshes['learner']
  both.close()
  one.close()


# A pair of places: parameters travel, moments stay with the learner.

N = 256
BIG = 4 * N * N


@stages.stage('act', unbatched=(0,))
def act(w, x):
  return x @ w


def _learn(w, m, x):
  g = x.T @ x
  return w + g, m + g * g


learn = stages.Stage(_learn, 'learn', 'batch')


def pair(check=lambda x: x, fail_at=None):
  """act → check → learn; returns state, arguments and flow."""
  count = iter(range(1, 100))

  def checked(x):
    if next(count) == fail_at:
      raise LookupError('it is away')
    return check(x)

  look = stages.Stage(checked, 'look', host=True, out_shapes=lambda x: x)

  def step(state, x, key):
    del key
    w, m = state
    w, m = learn(w, m, look(act(w, x)))
    return (w, m), ()

  state = (jnp.eye(N), jnp.zeros((N, N)))
  args = state, np.ones((8, N), np.float32), jax.random.key(0)
  return state, args, flow_lib.trace(step, *args)


def two(flow, **fields):
  where = {'act': 'actor', 'look': 'learner', 'learn': 'learner'}
  plan = plan_lib.parse(
    {'places': BOTH, 'stages': where, 'shared_devices': SHARE} | fields
  )
  return local.LocalRuntime(plan, step=flow)


@pytest.fixture
def account(monkeypatch):
  """Bytes of each place by kind of memory, after every instruction."""
  records, memory, lock = [], {}, threading.Lock()
  interpret = interpreter.Interpreter._interpret

  def counted(self, frame, op):
    interpret(self, frame, op)
    with lock:
      found = {id(x): x for memory in self._memories() for x in memory.values()}
      away = [offload.is_offloaded(x) for x in found.values()]
      sizes = [x.nbytes for x in found.values()]
      pairs = list(zip(away, sizes, strict=True))
      memory[self.place.name] = {
        'device': sum(n for gone, n in pairs if not gone),
        'host': sum(n for gone, n in pairs if gone),
        'lease': self.place.lease is not None and self.place.lease.held,
      }
      live = sum(
        x.nbytes
        for x in jax.live_arrays()
        if not x.is_deleted() and not offload.is_offloaded(x)
      )
      records.append(({k: dict(x) for k, x in memory.items()}, live))

  monkeypatch.setattr(interpreter.Interpreter, '_interpret', counted)
  return records


def test_only_the_holder_of_a_shared_device_has_memory_on_it(account):
  state, (_, x, key), flow = pair()
  state = jax.device_get(state)
  runtime = two(flow)
  in_memory.start(runtime, state)
  before = sum(
    x.nbytes for x in jax.live_arrays() if not offload.is_offloaded(x)
  )
  for _ in range(3):
    runtime.step(x, key)
  runtime.close()
  peaks = {name: max(s[name]['device'] for s, _ in account if name in s)
           for name in BOTH}  # fmt: skip
  for places, _ in account:
    with_memory = [name for name, at in places.items() if at['device']]
    assert len(with_memory) <= 1
    assert all(places[name]['lease'] for name in with_memory)
  # Parameters at the actor; at the learner parameters and moments, old and new.
  assert BIG <= peaks['actor'] < 1.2 * BIG
  assert 2 * BIG <= peaks['learner'] < 4.2 * BIG
  # The peak of all live arrays is that of the larger place, not their sum.
  most = max(live for _, live in account) - before
  assert most <= max(peaks.values()) < sum(peaks.values())


def test_a_place_that_fails_releases_the_device_and_stops_the_other(account):
  state, (_, x, key), flow = pair(fail_at=2)
  runtime = two(flow)
  in_memory.start(runtime, state)
  runtime.step(x, key)
  with pytest.raises(base.StageError, match='Stage look on place .* step 2'):
    runtime.step(x, key)
  assert not any(place.lease.held for place in runtime.places.values())
  in_memory.start(runtime, state, 1)
  runtime.step(x, key)
  runtime.close()


def test_a_lease_timeout_names_the_holder():
  state, (_, x, key), flow = pair()
  # All stages on one place, which therefore waits for no value.
  runtime = two(flow, stages=dict.fromkeys(flow.stages, 'learner'))
  runtime.receive_timeout = 0.2
  in_memory.start(runtime, state)
  at = runtime.places['learner'].lease.folder
  other = lease_lib.Lease(at, 'A stranger', 0)
  other.acquire()
  with pytest.raises(
    base.StageError,
    match=r"In step 1: Place 'learner' waited 0.2 s .*A str",
  ):
    runtime.step(x, key)
  other.release()
  runtime.close()
