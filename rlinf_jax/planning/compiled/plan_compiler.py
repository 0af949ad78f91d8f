"""Compiles the stages of a plan for devices that need not be here."""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
import math
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from planner import formatting
from planner.costs.mesh import per_device
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import passes, rounding
from planner.search import result as result_lib
from rlinf_jax.planning.compiled import cycles, errors, partitioner
from rlinf_jax.planning.compiled import executable as executable_lib
from rlinf_jax.runtime import programs
from rlinf_jax.runtime.places import place as place_lib


class CompiledStage(NamedTuple):
  """A stage of a plan as the compiler sees it.

  Attributes:
    name: of the stage.
    place: where the plan runs it.
    rows: of a call.
    calls: of this executable in a step.
    seconds: that compiling took.
    executable: bytes, operations and communication of a call, on one device.
    rematerialized: operations whose arrays the partitioner replicates in full
      to change their layout.
    modeled: what the cost model says of the call.
    usable: bytes of a device that plans may use.
    least: seconds of a call by the compiler's estimates, if its communication
      is hidden, by kind of operation; none where there are no estimates.
  """

  name: str
  place: str
  rows: int
  calls: int
  seconds: float
  executable: executable_lib.Executable
  rematerialized: list[str]
  modeled: per_device.DeviceCosts
  usable: float
  least: Sequence[cycles.Least] = ()

  @property
  def total(self) -> float:
    """Bytes of a device during the call, values of other stages included."""
    return self.executable.memory.needed + self.modeled.others


class CompiledPlan(NamedTuple):
  """The compiled stages of a plan.

  Attributes:
    stages: what was compiled.
    refusal: a sentence on why the plan cannot run; None if it can.
    refused: the stage that it is about; None if it is not about one.
    lacks: bytes of each device that this stage lacks; None if it lacks none, or
      the compiler does not say how many it needs.
  """

  stages: list[CompiledStage]
  refusal: str | None = None
  refused: str | None = None
  lacks: float | None = None


class PlanCompiler:
  """Compiles plans of one flow, each distinct stage once.

  Plans that agree on a place and its micro-batches share what is compiled.

  Attributes:
    flow: as recorded, without loops.
    model: the cost model.
    devices: the devices that plans number.
    report: is told what was compiled, and how long it took.
  """

  def __init__(
    self,
    flow: graph.Flow,
    model,
    devices: Sequence[jax.Device],
    report: Callable[[str], None] = lambda text: None,
  ):
    self.flow, self.model, self.devices = flow, model, devices
    self.report = report
    self._places, self._read = {}, {}

  def compile(
    self, plan: plan_lib.Plan, only: Sequence[str] | None = None
  ) -> CompiledPlan:
    """Compiles the stages of a plan until one is refused.

    Stages that run on the host are left out, and so are the moves of rows
    that the planner adds.

    Args:
      plan: the plan.
      only: names of stages; None for all.
    """
    cut, lowered = passes.lower(self.flow, plan)
    held = rounding.held(cut, plan)
    found = {}
    try:
      places = {name: self._place(name, plan) for name in lowered}
    except ValueError as error:  # Some chips cannot form the mesh of a place.
      return CompiledPlan([], str(error))
    for name, program in lowered.items():
      place = places[name]
      for _, flow, op, passed in programs.stage_calls(cut, program):
        node = flow.nodes[op.node]
        if node.stage.host or graph.is_plumbing(node):
          continue
        if only is not None and node.name not in only:
          continue
        try:
          compiled = self._compile(place, flow, op, passed, held[name])
        except jax.errors.JaxRuntimeError as error:
          return CompiledPlan(
            [*found.values()],
            f'{node.name} on {plan.places[name]} does not compile: '
            f'{errors.message(error)}',
            node.name,
            self._lacking(plan, flow, node, error),
          )
        key = name, id(compiled)
        if key in found:
          found[key] = found[key]._replace(calls=found[key].calls + 1)
          continue
        found[key] = self._stage(plan, name, flow, node, compiled)
        stage = found[key]
        if refusal := self._overflow(plan, stage):
          lacks = stage.total - stage.usable
          return CompiledPlan([*found.values()], refusal, node.name, lacks)
    return CompiledPlan([*found.values()])

  def _place(self, name: str, plan: plan_lib.Plan) -> place_lib.Place:
    placement = plan.places[name]
    key = (
      placement,
      *(
        tuple(sorted(choice.items()))
        for choice in (plan.micro_batch, plan.remat)
      ),
      str(plan.compiler_options),
    )
    if key not in self._places:
      self._places[key] = place_lib.Place(
        name,
        placement,
        plan.micro_batch,
        self.model.layout.rules,
        available=self.devices,
        remat=plan.remat,
        compiler_options=plan.compiler_options,
      )
    return self._places[key]

  def _compile(self, place, flow, op, passed, rounded):
    """Compiles a call, and remembers what the compiler says of it."""
    node, streamed = flow.nodes[op.node], dict(op.streamed)
    place.check_node(flow, node)
    start = time.perf_counter()
    with partitioner.captured_warnings() as rematerialized:
      compiled = place.compile(flow, node, op.donate, passed, streamed, rounded)
    if id(compiled) not in self._read:
      seconds = time.perf_counter() - start
      self.report(f'Compiled {node.name} in {formatting.seconds(seconds)}.')
      axes = tuple(place.mesh.shape.items()) if place.mesh else ()
      num_devices = math.prod(size for _, size in axes)
      widths = _widths(flow, node, num_devices)
      read = executable_lib.read(
        compiled, axes, _lengths(flow, node), widths, place.device.platform
      )
      self._read[id(compiled)] = seconds, read, rematerialized
    return compiled

  def _stage(self, plan, place, flow, node, compiled) -> CompiledStage:
    seconds, read, rematerialized = self._read[id(compiled)]
    rows, modeled = flow.rows_of(node), self._modeled(plan, flow, node)
    device, least = self.model.cluster.device, ()
    if device.clock_hertz:
      peak = device.peak('bfloat16')
      least = tuple(x.least(device.clock_hertz, peak) for x in read.cycles)
    return CompiledStage(
      node.name,
      place,
      rows,
      1,
      seconds,
      read,
      rematerialized,
      modeled,
      self.model.cluster.capacity,
      least,
    )

  def _modeled(self, plan, flow, node) -> per_device.DeviceCosts:
    rows = flow.rows_of(node)
    return per_device.stage_costs(self.flow, plan, self.model, node.name, rows)

  def _lacking(self, plan, flow, node, error: Exception) -> float | None:
    """Returns the bytes that a stage lacks that does not compile."""
    needed = errors.needed_bytes(error)
    if needed is None:
      return None
    others = self._modeled(plan, flow, node).others
    lacks = needed + others - self.model.cluster.capacity
    # The compiler's chip may have less memory than the cluster file says.
    return lacks if lacks > 0 else None

  def _overflow(self, plan, stage: CompiledStage) -> str | None:
    """Says how much memory is lacking, if it is."""
    if stage.total <= stage.usable:
      return None
    needed, others, excess, usable = map(
      formatting.byte_size,
      (
        stage.executable.memory.needed,
        stage.modeled.others,
        stage.total - stage.usable,
        stage.usable,
      ),
    )
    return (
      f'{stage.name} on {plan.places[stage.place]} needs {needed} of each '
      f'device, beside {others} of other values: {excess} more than the '
      f'{usable} that are usable.'
    )


def _lengths(flow: graph.Flow, node: graph.Node) -> list[int]:
  """Returns the tokens of the sequences that a node reads and writes."""
  values = [flow.values[v] for v in (*node.reads, *node.writes)]
  return sorted(
    {
      value.shape[1]
      for value in values
      if len(value.shape) == 2
      and jax.dtypes.issubdtype(value.dtype, jnp.integer)
      and value.shape[1] > 1
    }
  )


def _widths(flow: graph.Flow, node: graph.Node, num_devices: int) -> set[int]:
  """Returns the sizes of the matrices that a node reads, and of their shards.

  Dimensions that follow each other, such as heads and their width, may be one.
  """
  shapes = {flow.values[v].shape for v in node.reads if v not in node.rows}
  sizes = {
    math.prod(shape[i:j])
    for shape in shapes
    for i, j in itertools.combinations(range(len(shape) + 1), 2)
  }
  shards = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
  return {size // n for size in sizes for n in shards if size % n == 0}


class Choice(NamedTuple):
  """The fastest plan that the compiler accepts.

  Attributes:
    result: the search, with that plan as its best.
    ranked: the plans that were not refused, and their seconds.
    compiled: its stages; None if every plan was refused.
    refused: faster plans that the compiler refused, and why.
    runners_up: slower plans that were compiled, too, with their seconds; a
      refused one is not ranked.
    nearest: of the faster plans that were refused, that which lacks the fewest
      bytes; None if of none is known how many it lacks.
  """

  result: result_lib.SearchResult
  ranked: list[tuple[plan_lib.Plan, float]]
  compiled: CompiledPlan | None
  refused: list[tuple[plan_lib.Plan, str]]
  runners_up: Sequence[tuple[plan_lib.Plan, float, CompiledPlan]] = ()
  nearest: tuple[plan_lib.Plan, CompiledPlan] | None = None


def first_accepted(
  compiler: PlanCompiler,
  result: result_lib.SearchResult,
  ranked: Sequence[tuple[plan_lib.Plan, float]],
  relieved: Callable[
    [plan_lib.Plan, str | None], Sequence[tuple[plan_lib.Plan, float]]
  ] = lambda plan, stage: (),
) -> Choice:
  """Compiles plans, the fastest first, until one is accepted.

  The search's lower bound holds for every plan of its space, so the gap of an
  accepted plan is measured from there.

  Args:
    compiler: of the flow that was searched.
    result: of the search.
    ranked: plans and their seconds, the fastest first.
    relieved: of a plan and the stage that was refused, plans that need less
      memory, and their seconds.
  """
  refused, left, nearest = [], list(ranked), None
  while left:
    plan, seconds = left[0]
    compiled = compiler.compile(plan)
    if compiled.refusal is None:
      gap = 1 - result.bound / seconds if refused else result.gap
      chosen = dataclasses.replace(
        result,
        best=plan,
        seconds=seconds,
        gap=gap,
        ranked=left,
        infeasible=[*refused, *result.infeasible],
      )
      return Choice(chosen, chosen.ranked, compiled, refused, nearest=nearest)
    compiler.report(f'Refused: {compiled.refusal}')
    refused.append((plan, compiled.refusal))
    if compiled.lacks is not None:
      nearest = min(
        filter(None, (nearest, (plan, compiled))),
        key=lambda pair: pair[1].lacks,
      )
    known = [some for some, _ in (*refused, *left)]
    others = relieved(plan, compiled.refused)
    left = sorted(
      [*left[1:], *(pair for pair in others if pair[0] not in known)],
      key=lambda pair: pair[1],
    )
  chosen = dataclasses.replace(
    result,
    best=None,
    gap=1.0,  # Plans that the search did not rank were not compiled.
    ranked=[],
    infeasible=[*refused, *result.infeasible],
  )
  return Choice(chosen, [], None, refused, nearest=nearest)


def with_runners_up(
  compiler: PlanCompiler, choice: Choice, count: int
) -> Choice:
  """Compiles the plans that follow the fastest, until `count` are accepted.

  Those that are refused are no longer ranked.

  Args:
    compiler: of the flow that was searched.
    choice: the fastest plan that was accepted.
    count: plans to accept, if there are so many.
  """
  compiled, refused, left = [], [], count
  for plan, seconds in choice.ranked[1:]:
    if not left:
      break
    found = compiler.compile(plan)
    compiled.append((plan, seconds, found))
    if found.refusal is None:
      left -= 1
    else:
      compiler.report(f'Refused: {found.refusal}')
      refused.append((plan, found.refusal))
  plans = [plan for plan, _ in refused]
  ranked = [pair for pair in choice.ranked if pair[0] not in plans]
  infeasible = [*choice.result.infeasible, *refused]
  result = dataclasses.replace(
    choice.result, ranked=ranked, infeasible=infeasible
  )
  return choice._replace(result=result, ranked=ranked, runners_up=compiled)
