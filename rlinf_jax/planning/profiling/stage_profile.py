"""Measures the seconds of a flow's stages on this machine, by their rows.

A stage is measured with its actual inputs: the flow is run once, and each stage
that matters is called with its inputs and with some of their first rows. Where
devices share a processor, a stage is measured on one of them and then on as
many at once as there are cores, which shows how much they slow each other down.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp

from planner.costs import measured as measured_lib
from planner.costs import roofline
from planner.ir import graph as graph_lib
from planner.ir import plan as plan_lib
from rlinf_jax.planning.profiling import call_timing, machine_profile
from rlinf_jax.planning.profiling import profile_store as profile_store_lib
from rlinf_jax.runtime.places import place as place_lib
from sharding import rules as rules_lib

SHARE = 0.01  # Of a modeled step: shorter stages are not measured.
SIZES = 3  # Numbers of rows, from one group to the most that fit in memory.
TURNS = 4  # Micro-batches that are measured in one call.
FILL = 0.5  # Of a device's memory: a measurement may need so much, as modeled.
ADDRESS = re.compile(r'0x[0-9a-f]+')

# Reads inputs and carried values of a flow, by id.
Read = Callable[[Iterable[int]], Mapping[int, jax.Array]]


def measure(
  flow: graph_lib.Flow,
  read: Read,
  model: roofline.Roofline,
  store: profile_store_lib.Store,
  rules: rules_lib.Rules = rules_lib.DEFAULT,
  print_line: Callable[[str], None] | None = None,
) -> measured_lib.Measurements:
  """Measures the stages that matter; runs nothing if all are in the store.

  Args:
    flow: as recorded.
    read: reads its inputs and carried values.
    model: decides which stages matter and what fits in memory.
    store: earlier measurements.
    rules: mesh axes of each letter.
    print_line: prints the name of each stage before it is measured.
  """
  nodes = calls_to_measure(flow, model)
  plans = {name: _Case(flow, node, model) for name, node in nodes.items()}
  known = {name: store.get(plan.what) for name, plan in plans.items()}
  missing = {name for name, found in known.items() if found is None}
  if missing:
    bench = Bench(flow, read, model, rules)
    wanted = {n: plan for n, plan in plans.items() if n in missing}
    for name, found in bench.run(wanted, print_line):
      store.put(plans[name].what, found)
      known[name] = found
  return _tables(known)


def _tables(known) -> measured_lib.Measurements:
  """Converts the measurements of stages to tables for a cost model."""
  curves, constants, turns, contention = {}, {}, {}, {}
  for name, found in known.items():
    points, key = found['points'], (name, 1, ())
    if found['contention']:
      contention[name] = found['contention']
    if len(points) < SIZES:
      constants[key] = points[-1][1]
      continue
    curves[key] = measured_lib.RowCurve(tuple(map(tuple, points)))
    if found['turns']:
      # The largest number of rows that fits is a call of its own.
      points = [*found['turns'], points[-1]]
      turns[key] = measured_lib.RowCurve(tuple(map(tuple, points)))
  return measured_lib.Measurements(
    curves, constants, turns, contention=contention
  )


def fits(flow: graph_lib.Flow) -> bool:
  """Whether one device has room for the carried values and for the stages."""
  carried = sum(flow.values[start].bytes for start, _ in flow.carry)
  return carried <= FILL * machine_profile.memory()


def calls_to_measure(
  flow: graph_lib.Flow, model: roofline.Roofline
) -> dict[str, graph_lib.Node]:
  """Returns the stages that matter, each as its call with the most rows.

  Host stages always do, as their work cannot be counted.
  """
  placement = plan_lib.Placement()
  spent, calls = {}, {}
  for node in flow.nodes:
    if graph_lib.is_plumbing(node) or graph_lib.is_routing(node):
      continue
    if uses_up(node) and len(successors(flow, node)) < len(node.consumes):
      continue  # It could be called only once.
    seconds = model.seconds(flow, node, placement, None)
    spent[node.name] = spent.get(node.name, 0.0) + seconds
    largest = calls.setdefault(node.name, node)
    if flow.rows_of(node) > flow.rows_of(largest):
      calls[node.name] = node
  least = SHARE * sum(spent.values())
  return {
    name: node
    for name, node in calls.items()
    if node.stage.host or spent[name] >= least
  }


def uses_up(node: graph_lib.Node) -> bool:
  """Whether a call uses up a token, such as that of a simulator."""
  return bool(node.stage.host and node.consumes)


def successors(flow: graph_lib.Flow, node: graph_lib.Node) -> dict[int, int]:
  """Maps each value that a node uses up to the output that replaces it."""
  kinds = [_kind(flow, v) for v in node.writes]
  found = {}
  for v in node.reads:
    if v in node.consumes and _kind(flow, v) in kinds:
      i = kinds.index(_kind(flow, v))
      found[v], kinds[i] = i, None
  return found


def sizes(rows: int, group: int, most: int) -> tuple[int, ...]:
  """Returns rows to measure: divisors of all rows, from a group to `most`."""
  groups = rows // group
  shares = [n for n in range(1, groups + 1) if not groups % n]
  shares = [n for n in shares if n * group <= most] or shares[:1]
  middle = (shares[0] * shares[-1]) ** 0.5
  between = min(shares, key=lambda n: abs(n - middle))
  return tuple(n * group for n in sorted({shares[0], between, shares[-1]}))


class _Case:
  """The measurements of a stage.

  Attributes:
    node: the call to measure.
    rows: numbers of rows; 0 for a stage without rows.
    what: everything that its seconds depend on.
  """

  def __init__(self, flow, node, model):
    self.node = node
    num_rows, group = flow.rows_of(node), node.stage.group_size
    most = _most(flow, node, model)
    self.rows = sizes(num_rows, group, most) if num_rows else (0,)
    self.what = {
      'what': 'stage',
      'stage': node.name,
      'rows': self.rows,
      'grain': [node.stage.grain, group],
      'reads': [_kind(flow, v) for v in node.reads],
      'writes': [_kind(flow, v) for v in node.writes],
      'program': _program(flow, node),
      'busy_devices': machine_profile.busy_devices(),
    }


def _kind(flow, v):
  return [list(flow.values[v].shape), str(flow.values[v].dtype)]


def _program(flow, node) -> str:
  """Returns the text of a stage, without addresses, which vary by process."""
  stage = node.stage
  if stage.host:
    return ADDRESS.sub('', '\n'.join(_python(stage.fn)))
  like = [
    jax.ShapeDtypeStruct(flow.values[v].shape, flow.values[v].dtype)
    for v in node.reads
  ]
  traced = stage.run.trace(*jax.tree.unflatten(node.in_tree, like))
  return ADDRESS.sub('', str(traced.jaxpr))


def _python(fn) -> Iterator[str]:
  """Yields the source of a Python function's module, and its bound values.

  Functions of other modules are not included.
  """
  while isinstance(fn, functools.partial):
    yield f'{fn.args} {fn.keywords}'
    fn = fn.func
  fn = inspect.unwrap(fn)
  if inspect.ismethod(fn):
    yield repr(fn.__self__)
  kind = fn if hasattr(fn, '__qualname__') else type(fn)
  yield f'{kind.__module__}.{kind.__qualname__}'
  with contextlib.suppress(
    OSError, TypeError
  ):  # Defined interactively, or not Python.
    yield inspect.getsource(inspect.getmodule(kind))
  if inspect.isfunction(fn):
    yield str(inspect.getclosurevars(fn).nonlocals)


def _most(flow, node, model) -> int:
  """Returns the most rows that fit in memory, as modeled."""
  num_rows, call = flow.rows_of(node), model.works[node.name]
  if call is None or node.stage.host:
    return num_rows
  rows = num_rows
  while rows > node.stage.group_size:
    if call.at(rows).bytes_alive <= FILL * model.capacity:
      break
    rows //= 2
  return rows


def resized(flow: graph_lib.Flow, node: graph_lib.Node, rows: int):
  """Returns the flow with another number of rows of a node."""
  changed = node.rows
  if node.stage.grain == 'row':
    changed = changed | set(node.writes)
  values = list(flow.values)
  for v in changed:
    shape = (rows, *values[v].shape[1:])
    values[v] = dataclasses.replace(values[v], shape=shape)
  return dataclasses.replace(flow, values=tuple(values))


class Bench:
  """Runs a flow once on the first device, and measures stages on the way.

  Attributes:
    places: the devices that measure at the same time.
    memory: the values read and computed so far, by id.
  """

  def __init__(self, flow, read: Read, model, rules=rules_lib.DEFAULT):
    self.flow, self.read, self.model = flow, read, model
    self.places = [
      place_lib.Place(f'device {i}', plan_lib.Placement((i,)), {}, rules)
      for i in range(machine_profile.busy_devices())
    ]
    self.memory = {}
    self.last = {v: i for i, node in enumerate(flow.nodes) for v in node.reads}

  def run(
    self,
    plans: Mapping[str, _Case],
    print_line: Callable[[str], None] | None = None,
  ):
    """Yields the name of each stage and its measurement.

    The measurement has 'points', seconds of a call on one device by its rows;
    'turns', seconds of one of several micro-batches by its rows; and
    'contention', how many times as long the last of these calls takes on all
    cores at once, None where devices share no cores.
    """
    if not plans:
      return
    nodes = {id(plan.node): name for name, plan in plans.items()}
    number = 0
    ends = max(i for i, n in enumerate(self.flow.nodes) if id(n) in nodes)
    for i, node in enumerate(self.flow.nodes[: ends + 1]):
      name = nodes.get(id(node))
      self.fetch(node)
      if name is not None:
        number += 1
        if print_line:
          print_line(f'  {name} ({number} of {len(plans)})')
        yield name, self._measured(node, plans[name].rows)
      if i < ends:
        self.make(node)
      for v in {*node.reads, *node.writes}:
        if self.last.get(v, -1) <= i:
          self.memory.pop(v, None)

  def fetch(self, node):
    """Reads what a node reads and no earlier one has read or computed."""
    missing = [v for v in dict.fromkeys(node.reads) if v not in self.memory]
    for v, x in self.read(missing).items():
      self.memory[v] = self.places[0].put(self.flow.values[v], x)

  def _measured(self, node, rows):
    """Measures a node with some numbers of rows."""
    num_rows = self.flow.rows_of(node)
    several = node.stage.grain in ('row', 'sum') and not node.stage.host
    small = rows[:-1] if several else ()
    turns = [min(TURNS, num_rows // n) for n in small]
    cases = [self.calls(node, n)[:1] for n in rows]
    cases += [
      self.calls(node, n * k, (self._micro_batched(node, n),))
      for n, k in zip(small, turns, strict=True)
    ]
    if len(self.places) > 1 and not uses_up(node):
      cases.append(self.calls(node, rows[-1]))
    took = iter(call_timing.seconds(cases))
    points = [(n, next(took)) for n in rows]
    each = [(n, next(took) / k) for n, k in zip(small, turns, strict=True)]
    contention = machine_profile.slowdown(points[-1][1], *took)
    return {'points': points, 'turns': each, 'contention': contention}

  def _micro_batched(self, node, rows: int) -> place_lib.Place:
    """Returns the first device, with a micro-batch for a node."""
    rules = self.places[0].rules
    placement = plan_lib.Placement((0,))
    return place_lib.Place('in turns', placement, {node.name: rows}, rules)

  def calls(self, node, rows: int, places=None):
    """Returns calls of a node on `rows` rows, one a device; 0 for no rows."""
    flow = resized(self.flow, node, rows) if rows else self.flow
    if uses_up(node):
      return [functools.partial(self._step, flow, node, rows)]
    given = [self._first(v, node, rows) for v in node.reads]
    calls = []
    for place in places or self.places:
      inputs = [
        place.put(flow.values[v], x)
        for v, x in zip(node.reads, given, strict=True)
      ]
      calls.append(functools.partial(place.compile(flow, node), *inputs))
    return calls

  def _step(self, flow, node, rows):
    """Calls a node that uses up a token, and keeps the returned token."""
    call = self.places[0].compile(flow, node, passed=())  # As in a program.
    outputs = call(*(self._first(v, node, rows) for v in node.reads))
    for v, i in successors(flow, node).items():
      rest = self.memory[v][len(outputs[i]) :]
      self.memory[v] = jnp.concatenate([outputs[i], rest])
    return outputs

  def _first(self, v, node, rows):
    x = self.memory[v]
    return x[:rows] if rows and v in node.rows else x

  def make(self, node):
    """Computes the outputs of a node, from repeated rows if not all fit."""
    num_rows = self.flow.rows_of(node)
    most = _most(self.flow, node, self.model) if num_rows else 0
    rows = max(sizes(num_rows, node.stage.group_size, most)) if num_rows else 0
    flow = resized(self.flow, node, rows) if rows else self.flow
    call = self.places[0].compile(flow, node)
    outputs = call(*(self._first(v, node, rows) for v in node.reads))
    if rows < num_rows and node.stage.grain == 'row':
      outputs = [jnp.concatenate([x] * (num_rows // rows)) for x in outputs]
    self.memory.update(zip(node.writes, outputs, strict=True))
