"""A hybrid plan of a vision-language-action model and simulators' processes."""

import functools

import jax
import pytest

import in_memory
import pictured_pendulum
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.envs import env_pool
from rlinf_jax.runtime import local
from stages import workflows
from stages.learn import optimizers
from stages.models.vision import vit
from stages.vla.pi0 import pi0, pi0_policy
import tiny

pytestmark = pytest.mark.slow

ROWS, CHUNK, STEPS = 4, 2, 2
KEY = jax.random.key(0)
ROBOTS, LEARNER = ('simulate', 'collect'), ('gradient', 'apply', 'merge_info')
HYBRID = {
  'places': {
    'robots': {'devices': [0]},
    'policy': {'devices': [1]},
    'learner': {'devices': [2]},
  },
  'stages': dict.fromkeys(ROBOTS, 'robots')
  | dict.fromkeys(LEARNER, 'learner')
  | {'*': 'policy'},
  'pieces': 2,
}


def policy():
  sizes = {'L': 1, 'D': 8, 'H': 1, 'init_stddev': 0.3}
  gemma = functools.partial(pi0.GEMMA, K=1, W=8, F=8, **sizes)
  tower = vit.Config(
    image_size=pictured_pendulum.SIZE, patch_size=4, F=4, **sizes
  )
  config = pi0.Config(tower, gemma(V=8), gemma(V=1), Z=CHUNK, A=1, O=3)
  return functools.partial(
    pi0_policy.policy,
    config=config,
    instruction=(1, 5, 3),
    num_steps=2,
    critic_width=8,
  )


def run(sketch):
  """Metrics and state after each of some steps, and when stages ran."""
  env = env_pool.env(
    pictured_pendulum.make, ROWS, num_processes=2, chunk=CHUNK, discount=0.9
  )
  workflow = workflows.embodied_ppo(
    env,
    policy(),
    optimizers.adamw(1e-2),
    num_envs=ROWS,
    num_steps=4,
    num_minibatches=2,
    num_epochs=1,
  )
  state = workflow.init(KEY)
  step = flow_lib.trace(workflow.step, state, (), KEY)
  runtime = local.LocalRuntime(plan_lib.parse(sketch, step.stages), step=step)
  in_memory.start(runtime, state)
  results = []
  for i in range(STEPS):
    info = runtime.step((), jax.random.fold_in(KEY, i))
    results.append((tiny.arrays(info), tiny.arrays(in_memory.state(runtime))))
  spans = [s for s in runtime.timeline.take() if s.what == 'run']
  runtime.close()
  return results, spans


def test_simulators_policy_and_learning_at_places_of_their_own_change_no_bit():
  want, _ = run({'pieces': 2})
  got, spans = run(HYBRID)
  for one, other in zip(got, want, strict=True):
    for x, y in zip(one, other, strict=True):
      tiny.assert_same_bits(x, y)
  moved = [n for n, x in got[0][1].items() if (x != got[1][1][n]).any()]
  for part in 'vision', 'trunk', 'expert', 'critic':
    assert any(part in name for name in moved), (part, moved)
  where = {s.stage: s.place for s in spans}
  assert [where[x] for x in ('simulate', 'act', 'gradient')] == [
    'robots',
    'policy',
    'learner',
  ]
  for stage in 'simulate', 'act':
    assert {s.piece for s in spans if s.stage == stage} == {(1, 2), (2, 2)}
