"""Draws one step of GRPO under three plans.

  python -m experiments.pictures

Writes docs/pictures/three_plans.svg. The seconds are assumed: generation is the
longest stage and does not speed up with all of its devices, learning does.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from planner.explain import plan_data
from planner.ir import flow as flow_lib
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.simulation import evaluate_plan
from rlinf_jax.report.html import timeline_svg
import stages
from stages import workflows
from stages.language import language_model
from stages.learn import optimizers
from stages.models import transformer

TARGET = pathlib.Path(__file__).parents[2] / 'docs/pictures/three_plans.svg'
# Seconds on one device, and how they fall with the number of devices.
SECONDS = {
  'generate': (24.0, 0.7),
  'reward': (1.6, 0.0),
  'ref_logp': (6.0, 1.0),
  'gradient': (14.0, 1.0),
  'apply': (0.4, 0.5),
}
ALL, ACTOR, LEARNER = [0, 1, 2, 3], [0, 1], [2, 3]
APART = {
  'actor': {'devices': ACTOR, 'axes': [['data', 2]]},
  'learner': {'devices': LEARNER, 'axes': [['data', 2]]},
}
ACTS = {'repeat': 'actor', 'keys': 'actor', 'generate': 'actor'}
PLANS = {
  'Collocated: one place has all four devices': {
    'places': {'all': {'devices': ALL, 'axes': [['data', 4]]}}
  },
  'Disaggregated: two places, one after the other': {
    'places': APART,
    'stages': {**ACTS, '*': 'learner'},
  },
  'Disaggregated and pipelined: the same, in four pieces': {
    'places': APART,
    'stages': {**ACTS, '*': 'learner'},
    'pieces': 4,
  },
}
WIDTH, TITLE = 860, 30
STYLE = """
  svg { font-family: system-ui, sans-serif; font-size: 13px;
    --s1: #2f62d9; --s2: #e58a2f; --s3: #2a9d7c; --s4: #9a5cc6; --s5: #c94f6d;
    --s6: #8b94a5; --soft: #aab2c0; --ink: #20242c; --idle: #eceff5; }
  @media (prefers-color-scheme: dark) {
    svg { --s1: #7ea4ff; --s2: #f0a657; --s3: #56c7a4; --s4: #bf8fe6;
      --ink: #e9e7e2; --idle: #262b35; } }
  text { fill: var(--ink); } .tick { font-size: 11px; opacity: 0.7; }
  .title { font-weight: 600; } .idle { fill: var(--idle); }
  .hair { stroke: var(--soft); stroke-opacity: 0.3; }
  .inside { fill: white; font-size: 12px; }
"""


class AssumedCosts:
  """Seconds of SECONDS, moves for a tenth of a second."""

  def seconds(self, flow, node, placement, *execution):
    """Seconds of a call: a piece takes its share."""
    del flow, execution
    one, power = SECONDS.get(node.name, (0.0, 0.0))
    return one / len(placement.devices) ** power / node.piece[1]

  def transfer(self, flow, value, source, target):
    """Seconds of a move between two places."""
    del flow, value, source, target
    return 0.02

  def switch(self, flow, value, placement):
    """Seconds of a move to or from host memory."""
    del flow, value, placement
    return 0.0

  def contention(self, stage, devices, beside):
    """Factor by which other busy devices slow a call down."""
    del stage, devices, beside
    return 1.0


@stages.stage('reward')
def reward(answer, action, mask):
  """Stands for a verifier: nothing is computed here."""
  del answer
  row_B = (action * mask).sum(1).astype(jnp.float32)
  return stages.Verdict(row_B, row_B)


def flow() -> graph.Flow:
  """The flow of a GRPO step with a reference model."""
  config = transformer.Config(V=32, D=32, L=2, H=4, K=2, W=8, F=64)
  policy = language_model.policy(config, response_length=8)
  grpo = workflows.grpo(
    policy, reward, optimizers.adamw(1e-3), group_size=4, kl_coef=0.1
  )
  token = np.zeros((16, 4), np.int32)
  problem = stages.Problem(stages.Prompt(token, token + 1), ())
  key = jax.random.key(0)
  return flow_lib.trace(grpo.step, jax.eval_shape(grpo.init, key), problem, key)


def draw() -> str:
  """The picture: a timeline a plan, on one scale."""
  recorded, drawn = flow(), []
  for title, sketch in PLANS.items():
    plan = plan_lib.parse(sketch, recorded.stages)
    drawn.append(
      (title, evaluate_plan.evaluate(recorded, AssumedCosts(), plan))
    )
  longest = max(evaluation.seconds for _, evaluation in drawn)
  colors = {name: i + 1 for i, name in enumerate(SECONDS)}
  colors |= {name: 6 for name in recorded.stages if name not in colors}
  left = timeline_svg.margin(['learner'])
  parts, y = [], 0
  for title, evaluation in drawn:
    picture = timeline_svg.draw(
      plan_data.timeline(evaluation),
      list(evaluation.plan.places),
      colors,
      end=evaluation.seconds,
      seconds=longest,
      left=left,
      width=WIDTH,
    )
    _, _, width, height = picture.split('"')[1].split()
    parts.append(
      f'<text x="0" y="{y + 18}" class="title">{title}, '
      f'{evaluation.seconds:.1f} s a step</text>'
      + picture.replace(
        '<svg ', f'<svg y="{y + TITLE}" width="{width}" height="{height}" ', 1
      )
    )
    y += TITLE + int(height) + 8
  for i, name in enumerate(SECONDS):
    parts.append(
      f'<rect x="{left + 110 * i}" y="{y}" width="12" height="12" rx="2" '
      f'fill="var(--s{colors[name]})"/>'
      f'<text x="{left + 110 * i + 18}" y="{y + 11}">{name}</text>'
    )
  y += 20
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}">'
    f'<style>{STYLE}</style>{"".join(parts)}</svg>\n'
  )


if __name__ == '__main__':
  TARGET.write_text(draw())
  print(TARGET)
