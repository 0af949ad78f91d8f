"""Runs the programs of a plan in this process."""

from concurrent import futures

import jax
import jax.numpy as jnp

from planner import flow as flow_lib
from planner import plan as plan_lib
from planner import program as program_lib
from rlinf_jax.runtime import place as place_lib
from rlinf_jax.runtime import timeline as timeline_lib
from sharding import rules as rules_lib


class StageError(RuntimeError):
  """A stage failed; says which, where and when."""


class Local:
  """A plan's place in this process, holding the state that steps carry.

  Attributes:
    timeline: what ran when.
  """

  def __init__(
    self,
    plan: plan_lib.Plan,
    *,
    step: flow_lib.Flow,
    evaluate: flow_lib.Flow | None = None,
    rules: rules_lib.Rules = rules_lib.DEFAULT,
  ):
    """Refuses what the plan cannot run; computes nothing.

    Args:
      plan: of one place.
      step: the flow of its step.
      evaluate: the flow of its evaluation, which carries the state unchanged.
      rules: from letters to mesh axes.
    """
    self.plan = plan
    self.flows = {'step': step} | ({'evaluate': evaluate} if evaluate else {})
    self.programs = {}
    for name, flow in self.flows.items():
      ((place, self.programs[name]),) = program_lib.lower(flow, plan).items()
    self.place = place_lib.Place(place, plan.places[place], plan.rows, rules)
    self.timeline = timeline_lib.Timeline()
    self.steps = 0
    self._calls = {}
    for flow in self.flows.values():
      for value in flow.values:
        self.place.layout(value)
      for node in flow.nodes:
        self.place.check_rows(flow, node)

  def load(self, state, steps: int = 0):
    """Lays out `state` as the plan has it; a copy, as steps overwrite it.

    Args:
      state: the workflow's, as arrays.
      steps: updates that led to it.
    """
    flow, self.steps = self.flows['step'], steps
    self._tree = jax.tree.structure(state)
    laid = [
      self.place.put(flow.values[v], x)
      for (v, _), x in zip(flow.carry, jax.tree.leaves(state), strict=True)
    ]
    self._state = jax.jit(lambda xs: [jnp.copy(x) for x in xs])(laid)

  def state(self):
    """The carried state. The next step overwrites it: copy what must last."""
    return jax.tree.unflatten(self._tree, self._state)

  def compile(self, name: str):
    """Begins to make every stage of a flow ready; does not wait for it."""
    if name in self._calls:
      return
    flow, program = self.flows[name], self.programs[name]
    pool = futures.ThreadPoolExecutor(2)
    self._calls[name] = {
      op.node: pool.submit(
        self.place.compile, flow, flow.nodes[op.node], op.donate
      )
      for op in program
      if isinstance(op, program_lib.Run)
    }
    pool.shutdown(wait=False)

  def step(self, batch, key):
    """One step of the workflow; returns what it reports, on the device."""
    made = self._run('step', batch, key)
    self.steps += 1
    return made

  def evaluate(self, batch, key):
    """Evaluates the state as it is; returns what it reports."""
    return self._run('evaluate', batch, key)

  def _run(self, name, *inputs):
    flow = self.flows[name]
    self.compile(name)
    memory = dict(zip((s for s, _ in flow.carry), self._state, strict=True))
    for v, x in zip(flow.inputs, jax.tree.leaves(inputs), strict=True):
      memory[v] = self.place.put(flow.values[v], x)
    kept = {}
    for op in self.programs[name]:
      self._interpret(name, flow, op, memory, kept)
    self._state = [(memory | kept)[start] for start, _ in flow.carry]
    return jax.tree.unflatten(flow.gives, [memory[v] for v in flow.outputs])

  def _interpret(self, name, flow, op, memory, kept):
    match op:
      case program_lib.Run(i, donate):
        node, start = flow.nodes[i], self.timeline.now()
        try:
          run = self._calls[name][i].result()
          made = run(*(memory[v] for v in node.reads))
          # Seconds by stage are worth more than a dispatch ahead of the device.
          jax.block_until_ready(made)
        except Exception as error:
          raise StageError(
            f'Stage {node.name} on place {self.place.name!r} failed in step '
            f'{self.steps + 1}: {error}'
          ) from error
        self.timeline.add(self.steps + 1, self.place.name, node.name, start)
        for v in donate:
          del memory[v]
        memory.update(zip(node.writes, made, strict=True))
      case program_lib.Keep(end, start):
        kept[start] = memory[end]
      case program_lib.Drop(v):
        del memory[v]
