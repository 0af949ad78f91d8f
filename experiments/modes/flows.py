"""Flows of the published workloads, and the work of their stages.

Written from sizes of models: 2 · N operations a token and a pass, 3 times that
and a pass more to learn, since the published recipes compute activations again.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from experiments.modes import published
from planner.costs.decoding import contexts, decode
from planner.costs.measured import Estimate
from planner.costs.work import NONE, StageWork, Work
from planner.ir import graph

HALF, SINGLE = np.dtype('float16'), np.dtype('float32')
KERNELS = 10  # A layer and a pass. Assumptions.
PROMPT = 256  # Tokens. Assumptions: published are 512 and 1,024 at most.
ENGINE = 0.4  # Of memory, for keys and values. Recipes: 0.3 to 0.65 in all.
BLOCKS = 4  # Blocks that stand for the steps of an episode.


@dataclasses.dataclass(frozen=True)
class Stage:
  """The fields of a stage that the planner uses."""

  name: str
  grain: str = 'row'
  group_size: int = 1
  divisible_groups: bool = False
  host: bool = False
  unbatched = ()
  engine = None


class Workload(NamedTuple):
  """A flow and the work of its stages, as `roofline.Roofline` takes them.

  Attributes:
    flow: of a step.
    works: of its stages.
    colocated: groups of stages that share a place in every plan.
  """

  flow: graph.Flow
  works: dict
  colocated: tuple[tuple[str, ...], ...]


class FlowBuilder:
  """Builds a flow from values by name, which become numbers."""

  def __init__(self):
    self.values, self.nodes, self.number = [], [], {}

  def value(self, name, shape, dtype=SINGLE, letters=None):
    letters = letters or ('B', *[''] * (len(shape) - 1))
    self.number[name] = len(self.values)
    self.values.append(graph.Value(name, shape, dtype, letters))

  def parameters(self, name, model, dtype=HALF, copies=1):
    """Adds the parameters of a model: one array, which 8 devices can share."""
    rest = round(model.parameters / (model.L * model.D * 8))
    shape = copies * model.L, model.D, 8, rest
    self.value(name, shape, dtype, ('', 'D', 'F', ''))

  def node(self, stage, reads, writes, rows=()):
    at = self.number
    self.nodes.append(
      graph.Node(
        stage,
        tuple(at[v] for v in reads),
        tuple(at[v] for v in writes),
        frozenset(at[v] for v in rows),
      )
    )

  def learner(self, who, model, rows, group):
    """`train` and `apply` of a model, from some rows."""
    self.parameters(f'{who}gradients', model, SINGLE)
    self.parameters(f"{who}params'", model)
    self.parameters(f"{who}moments'", model, SINGLE, 3)
    self.node(
      Stage(f'{who}train', 'sum', group),
      (f'{who}params', *rows),
      (f'{who}gradients',),
      rows,
    )
    self.node(
      Stage(f'{who}apply', 'batch'),
      (f'{who}params', f'{who}moments', f'{who}gradients'),
      (f"{who}params'", f"{who}moments'"),
    )

  def state(self, who, model):
    """Parameters in half precision; a master copy and two moments in full."""
    self.parameters(f'{who}params', model)
    self.parameters(f'{who}moments', model, SINGLE, 3)

  def flow(self, inputs, models):
    at = self.number
    carry = [
      (at[f'{who}{what}'], at[f"{who}{what}'"])
      for who in models
      for what in ('params', 'moments')
    ]
    inputs = tuple(at[v] for v in inputs)
    return graph.Flow(
      tuple(self.nodes), tuple(self.values), inputs, (), tuple(carry)
    )


def workload(case: published.Case, rows: int, memory: float) -> Workload:
  """Returns the workload of a case.

  Args:
    case: which.
    rows: of a batch.
    memory: bytes of a device.
  """
  if case.flow == 'robot':
    return robot(case, rows)
  return language(case, rows, memory)


def language(case, rows: int, memory: float) -> Workload:
  """Generates, infers log-probabilities (and values), learns."""
  model, group = case.model, case.group_size
  lengths = published.lengths(case.tokens, case.max_tokens)
  critic = case.flow == 'ppo'
  models = ('', 'critic_') if critic else ('',)
  builder = FlowBuilder()
  builder.value('prompts', (rows, PROMPT))
  for who in models:
    builder.state(who, model)
  builder.value('x', (rows, math.ceil(lengths.mean())))
  builder.node(
    Stage('generate', group_size=group),
    ('params', 'prompts'),
    ('x',),
    ('prompts',),
  )
  there = ['x']
  for who in models if case.flow != 'grpo without inference' else ():
    inferred = f'{who}inferred'
    builder.value(inferred, (rows, math.ceil(lengths.mean())))
    stage = Stage(f'{who}infer', group_size=group)
    builder.node(stage, (f'{who}params', 'x'), (inferred,), ('x',))
    there.append(inferred)
  for who in models:
    builder.learner(who, model, tuple(there), group)
  works = {'generate': generation(model, lengths, group, memory)}
  for who in models:
    works |= {
      f'{who}infer': forward(model, lengths, rows),
      f'{who}train': forward(model, lengths, rows, passes=4),
      f'{who}apply': update(model),
    }
  together = tuple((f'{who}train', f'{who}apply') for who in models)
  return Workload(builder.flow(('prompts',), models), works, together)


def forward(model, lengths, rows: int, passes: int = 1) -> StageWork:
  """The work of `passes` passes over rows of such lengths."""
  tokens, squares = lengths.mean(), (lengths.astype(float) ** 2).mean()
  attention = 2 * model.L * model.H * model.W * squares  # Causal: half of it.
  flops = passes * (2 * model.active * tokens + attention)
  sums = 2 * model.L * passes
  return StageWork(
    Work(
      bytes_moved=passes * 2 * model.parameters,
      kernels=passes * KERNELS * model.L,
      partial={'F': (sums, 0.0, 0.0)},
    ),
    Work(
      flops=flops,
      matmul={'float16': flops},
      bytes_moved=passes * 20 * model.D * model.L * tokens,
      partial={'F': (0.0, sums * 2 * model.D * tokens, 0.0)},
    ),
    rows,
  )


def update(model) -> StageWork:
  """Reads gradients, moments and master copy, and writes all but the first."""
  n = model.parameters
  return StageWork(
    Work(flops=12 * n, bytes_moved=(4 + 12 + 12 + 2) * n, kernels=20)
  )


def generation(model, lengths, group: int, memory: float) -> decode.DecodeWork:
  """A step reads all parameters, and the keys and values of every token."""
  kept = 4 * model.L * model.K * model.W  # Bytes of a token.
  flops = 2 * model.active
  step = StageWork(
    Work(
      bytes_moved=2 * model.parameters,
      kernels=KERNELS * model.L,
      partial={'F': (2 * model.L, 0.0, 0.0)},
    ),
    Work(
      flops=flops,
      matmul={'float16': flops},
      bytes_moved=20 * model.D * model.L,
      partial={'F': (0.0, 4 * model.L * model.D, 0.0)},
    ),
  )
  attention = 4 * model.L * model.H * model.W
  token = Work(flops=attention, matmul={'float16': attention}, bytes_moved=kept)
  prompts = forward(model, np.array([PROMPT]), 0)
  return decode.DecodeWork(
    np.maximum(lengths - PROMPT, 1),
    step,
    [contexts.ColumnReads(token)],
    # A prompt is read once a group.
    dataclasses.replace(prompts, per_row=prompts.per_row.times(1 / group)),
    context=PROMPT,
    kept=kept * lengths.mean(),
    group_size=group,
    engine=True,
    budget=ENGINE * memory,
  )


@dataclasses.dataclass(frozen=True)
class Steps:
  """Steps whose seconds were published, as a line over the rows of a device.

  Attributes:
    steps: of a call.
    fixed: seconds of a step.
    row: seconds more for every row that a device has.
  """

  steps: float
  fixed: float
  row: float

  def seconds(self, model, flow, node, placement, rows):
    del flow, node
    each = rows / len(placement.devices)
    spent = self.steps * (self.fixed + self.row * each)
    return {'steps': Estimate(spent, 'assumed')}

  def bytes(self, flow, node, axes, layout, pieces, rows):
    """Grows with the rows, the paper says; it does not say how fast."""
    return {}

  def at(self, rows):
    del rows
    return NONE


def robot(case, rows: int) -> Workload:
  """A simulator and a policy take turns; then the policy learns from all steps.

  `BLOCKS` blocks stand for the steps: each is as many steps of the policy, then
  of the simulator. Work is the same, and a block's pieces overlap as steps
  would.
  """
  model, steps = case.model, published.STEPS[case.env]
  block = steps / BLOCKS
  builder = FlowBuilder()
  pixels, motion = (rows, 224, 224, 3), (rows, 56)
  builder.value('obs0', pixels, np.dtype('uint8'))
  builder.state('', model)
  for t in range(BLOCKS):
    builder.value(f'action{t}', motion)
    builder.value(f'obs{t + 1}', pixels, np.dtype('uint8'))
    obs, action = f'obs{t}', f'action{t}'
    builder.node(Stage('act'), ('params', obs), (action,), (obs,))
    builder.node(
      Stage('simulate'), (obs, action), (f'obs{t + 1}',), (obs, action)
    )
  steps_read = [
    f'{what}{t}' for t in range(BLOCKS) for what in ('obs', 'action')
  ]
  builder.learner('', model, (*steps_read, f'obs{BLOCKS}'), case.group_size)
  tokens = np.array([case.tokens])
  one = forward(model, tokens, rows)
  if case.env == 'maniskill':
    act = Steps(block, *published.OPENVLA_STEP)
    simulate = Steps(block, *published.MANISKILL_STEP)
  else:
    act = StageWork(one.fixed.times(block), one.per_row.times(block), rows)
    busy = published.LIBERO_CORE_SECONDS / published.CORES
    simulate = Steps(block, 0.0, busy)
  learn = forward(model, tokens, rows, passes=4)
  train = StageWork(learn.fixed, learn.per_row.times(steps), rows)
  works = {
    'act': act, 'simulate': simulate, 'train': train, 'apply': update(model)
  }  # fmt: skip
  flow = builder.flow(('obs0',), ('',))
  return Workload(flow, works, (('train', 'apply'),))
