"""Compares the speed of a complete rollout with that of bare simulators.

  python -m experiments.simulators --task PushCube-v1 --n 32 --processes 2
  python -m experiments.simulators --suite libero_object --n 8 --processes 2

Bare simulators are as many processes, each a plain loop over its share of the
environments that waits for nothing. The rollout is that of training, with a
policy, as the runtime runs it in one piece and in two. All take turns; the
rollouts continue in the same environments.
"""

import json
import statistics
import time

from absl import app, flags
import jax
import numpy as np

from experiments.simulators import bare as bare_lib
from experiments.simulators import worlds
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import local
from rlinf_jax.runtime import timeline as timeline_lib
from rlinf_jax.state import state_readers
import stages
from stages.envs.rollouts import obs_stats, rollout

TASK = flags.DEFINE_string('task', 'PushCube-v1', 'A task of ManiSkill.')
SUITE = flags.DEFINE_string(
  'suite', None, 'A suite of LIBERO, by pictures, in place of the task.'
)
N = flags.DEFINE_integer('n', 32, 'Environments.')
PROCESSES = flags.DEFINE_integer('processes', 2, 'Worker processes.')
CALLS = flags.DEFINE_integer('calls', 64, 'Decisions of each case in a turn.')
TURNS = flags.DEFINE_integer('turns', 7, 'Turns of each case.')
PIECES = (1, 2)


def main(_):
  """Prints a line of JSON."""
  n, P = N.value, PROCESSES.value
  if SUITE.value:
    world = worlds.pictures(SUITE.value, n, P)
  else:
    world = worlds.states(TASK.value, n, P)
  steps = CALLS.value * world.chunk
  shape = steps, n, len(world.env.action_low)
  action = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
  cases = {'bare': bare_lib.Bare(world.make, action, P, world.chunk).run}
  env_states = [rollout.init(world.env, np.arange(n, dtype=np.int32))]
  waits = {f'rollout in {pieces}': [] for pieces in PIECES}
  for pieces, (name, kept) in zip(PIECES, waits.items(), strict=True):
    cases[name] = rollout_case(world, pieces, env_states, kept)
  seconds = {name: [] for name in cases}
  for _ in range(TURNS.value + 1):
    for name, run in cases.items():
      seconds[name].append(run())
  seconds = {name: times[1:] for name, times in seconds.items()}  # Warm.
  median = lambda some: round(statistics.median(some), 3)
  result = {'task': SUITE.value or TASK.value, 'n': n, 'processes': P}
  for name, times in seconds.items():
    ratio = [b / s for b, s in zip(seconds['bare'], times, strict=True)]
    result[name] = {
      'steps a second': median([steps * n / s for s in times]),
      'of bare': median(ratio),
      'from': [round(x, 3) for x in (min(ratio), max(ratio))],
    }
    if name in waits:
      kept = waits[name][1:]
      result[name] |= {k: median([one[k] for one in kept]) for k in kept[0]}
  print(json.dumps(result, indent=2))


def rollout_case(world, pieces: int, env_states: list, waits: list):
  """Makes a case that continues `env_states[0]`; appends idle shares."""
  env, policy = world.env, world.policy
  act = rollout.rollout(policy, env, CALLS.value)
  given = policy.init(jax.random.key(0)), obs_stats.init(env.obs_spec)

  # The environments are an input of each step, as both cases continue them.
  def step(state, batch, key):
    env_state, obs = batch
    keys = stages.keys(key, obs)
    env_state, obs, x, timestep = act(*state, env_state, obs, keys)
    return state, ((env_state, obs), x.reward, timestep.reward)

  flow = flow_lib.trace(step, given, env_states[0], jax.random.key(0))
  plan = plan_lib.parse({'pieces': pieces}, flow.stages)
  runtime = local.LocalRuntime(plan, step=flow)
  runtime.start(state_readers.FirstState(lambda: given))

  def run() -> float:
    begin, busy = time.perf_counter(), time.process_time()
    key = jax.random.key(len(waits))
    env_states[0], *_ = runtime.step(env_states[0], key)
    spent = time.perf_counter() - begin
    busy = (time.process_time() - busy) / CALLS.value / pieces
    shares = timeline_lib.idle_fractions(runtime.timeline.take())
    shares_by_name = {f'{who} wait': share for who, share in shares.items()}
    # Of the learner's processor, for each call.
    waits.append(shares_by_name | {'milliseconds a call': 1e3 * busy})
    return spent

  return run


if __name__ == '__main__':
  app.run(main)
