"""Bytes and seconds of sending weights to the process that samples.

  python -m experiments.links.weights

A model of 12 million parameters in bfloat16 is trained by GRPO, by a plan whose
places are two processes of this machine. It is sent as the place that samples
holds it, rounded, and in float32, where the policy does not say what it rounds.
"""

import functools

import jax
import numpy as np

from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime.ray import driver
from rlinf_jax.state import state_readers
import stages
from stages import base, workflows
from stages.language import language_model
from stages.learn import optimizers
from stages.models import transformer

CONFIG = transformer.Config(
  V=32_000, D=256, L=4, H=4, K=2, W=64, F=1024, dtype='bfloat16'
)
STEPS = 4
KEY = jax.random.key(0)


@stages.stage('reward')
def reward(answer, action, mask):
  """Rewards even tokens."""
  del answer
  share = ((action % 2 == 0) * mask).mean(1)
  return base.Verdict(share, share)


def workflow(is_rounded: bool) -> base.Workflow:
  """GRPO of the model, which rounds its parameters before it samples."""
  policy = language_model.policy(CONFIG, response_length=4)
  if not is_rounded:
    policy = policy._replace(round_params=None)
  return workflows.grpo(policy, reward, optimizers.adamw(1e-4), group_size=4)


def batch() -> base.Problem:
  """Four prompts of four tokens."""
  token_BP = np.ones((4, 4), np.int32)
  return base.Problem(base.Prompt(token_BP, token_BP), np.zeros(4, np.int32))


def first(is_rounded: bool):
  """The state before the first step."""
  return workflow(is_rounded).init(KEY)


def trace(is_rounded: bool):
  """The flow of a step, as every process records it."""
  chosen = workflow(is_rounded)
  state = jax.eval_shape(chosen.init, KEY)
  return flow_lib.trace(chosen.step, state, batch(), KEY), None


def measure(is_rounded: bool) -> tuple[float, float]:
  """Megabytes and seconds of the weights that a step sends."""
  record = functools.partial(trace, is_rounded)
  step, _ = record()
  names = dict.fromkeys(step.stages, 'learner') | {'generate': 'sampler'}
  places = {'sampler': (0,), 'learner': (1,)}
  plan = plan_lib.Plan(
    {name: plan_lib.Placement(devices) for name, devices in places.items()},
    names,
  )
  runtime = driver.RayRuntime(plan, record, step=step)
  try:
    read = functools.partial(first, is_rounded)
    runtime.start(state_readers.FirstState(read))
    for i in range(STEPS):
      runtime.step(batch(), jax.random.fold_in(KEY, i))
    runtime.wait()
    size, seconds = runtime.moved()['learner', 'sampler']
  finally:
    runtime.close()
  return size / STEPS / 1e6, seconds / STEPS


def main():
  for is_rounded in False, True:
    megabytes, seconds = measure(is_rounded)
    kind = 'rounded' if is_rounded else 'in float32'
    print(f'{kind}: {megabytes:.1f} MB, {seconds:.2f} s a step', flush=True)


if __name__ == '__main__':
  # Processes import what this module defines, by its name.
  from experiments.links import weights

  weights.main()
