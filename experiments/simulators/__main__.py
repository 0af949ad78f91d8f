"""How much of bare simulators' speed a whole rollout keeps, on this machine.

  python -m experiments.simulators --task PushCube-v1 --n 32 --processes 2

Bare simulators are as many processes, each a plain loop over its share of the
environments that waits for nobody. Beside them is the rollout of PPO, with its
policy, as the runtime runs it in one piece and in two. All take turns; the
rollouts go on in the same environments.
"""

import json
import statistics
import time

from absl import app, flags
import jax
import numpy as np

from experiments.simulators import bare as bare_lib
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.envs import maniskill
from rlinf_jax.runtime import local
from rlinf_jax.runtime import timeline as timeline_lib
import stages
from stages.envs import obs_stats, rollout
from stages.models import gaussian_policy

TASK = flags.DEFINE_string('task', 'PushCube-v1', 'Which of ManiSkill.')
N = flags.DEFINE_integer('n', 32, 'Environments.')
PROCESSES = flags.DEFINE_integer('processes', 2, 'To spread them over.')
CALLS = flags.DEFINE_integer('calls', 64, 'Steps of each in a turn.')
TURNS = flags.DEFINE_integer('turns', 7, 'Of each kind.')
PIECES = (1, 2)


def main(_):
  """Prints a line of JSON."""
  n, P = N.value, PROCESSES.value
  world = maniskill.env(TASK.value, n, P)
  shape = CALLS.value, n, len(world.action_low)
  action = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
  cases = {'bare': bare_lib.Bare(TASK.value, action, P).run}
  there = [rollout.init(world, np.arange(n, dtype=np.int32))]
  waits = {f'rollout in {pieces}': [] for pieces in PIECES}
  for pieces, (name, kept) in zip(PIECES, waits.items(), strict=True):
    cases[name] = acting(world, pieces, there, kept)
  spent = {name: [] for name in cases}
  for _ in range(TURNS.value + 1):
    for name, run in cases.items():
      spent[name].append(run())
  spent = {name: seconds[1:] for name, seconds in spent.items()}  # Warm.
  middle = lambda some: round(statistics.median(some), 3)
  said = {'task': TASK.value, 'n': n, 'processes': P}
  for name, seconds in spent.items():
    ratio = [b / s for b, s in zip(spent['bare'], seconds, strict=True)]
    said[name] = {
      'steps a second': middle([CALLS.value * n / s for s in seconds]),
      'of bare': middle(ratio),
      'from': [round(x, 3) for x in (min(ratio), max(ratio))],
    }
    if name in waits:
      kept = waits[name][1:]
      said[name] |= {k: middle([one[k] for one in kept]) for k in kept[0]}
  print(json.dumps(said, indent=2))


def acting(world, pieces: int, there: list, waits: list):
  """Rolls out a policy from `there`; tells shares of time that sides wait."""
  policy = gaussian_policy.policy(world, width=128)
  act = rollout.rollout(policy, world, CALLS.value)
  given = policy.init(jax.random.key(0)), obs_stats.init(world.obs_spec)

  def step(state, given, key):
    place, obs = state
    keys = stages.keys(key, obs)
    place, obs, x, timestep = act(*given, place, obs, keys)
    return (place, obs), (x.reward, timestep.reward)

  flow = flow_lib.trace(step, there[0], given, jax.random.key(0))
  plan = plan_lib.parse({'pieces': pieces}, flow.stages)
  runtime = local.LocalRuntime(plan, step=flow)

  def run() -> float:
    runtime.load(there[0])
    begin, busy = time.perf_counter(), time.process_time()
    runtime.step(given, jax.random.key(len(waits)))
    spent = time.perf_counter() - begin
    busy = (time.process_time() - busy) / CALLS.value / pieces
    there[0] = runtime.state()
    shares = timeline_lib.idle_fractions(runtime.timeline.take())
    told = {f'{who} wait': share for who, share in shares.items()}
    # Of the learner's processor, for each call.
    waits.append(told | {'milliseconds a call': 1e3 * busy})
    return spent

  return run


if __name__ == '__main__':
  app.run(main)
