"""Seconds of the stages of a flow on this machine, by their rows.

A stage is measured on what it is really given: the flow is run once, and each
stage that matters is called on its inputs and on some first rows of them.
Where devices share a processor, it is measured on one of them, and then on as
many at once as there are cores: that tells how they slow each other down.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp

from planner.costs import measured as measured_lib
from planner.costs import roofline
from planner.counting import count
from planner.ir import graph as graph_lib
from planner.ir import plan as plan_lib
from rlinf_jax.planning import call_timing, machine_profile
from rlinf_jax.planning import profile_store as profile_store_lib
from rlinf_jax.runtime import place as place_lib
from sharding import rules as rules_lib

SHARE = 0.01  # Of a step, as modeled: what takes less is not measured.
SIZES = 3  # Numbers of rows, from one group to as many as memory has room for.
TURNS = 4  # Micro-batches that are measured in a row.
FILL = 0.5  # Of a device's memory, as modeled, that a measurement may take.
ADDRESS = re.compile(r'0x[0-9a-f]+')


def measure(
  flow: graph_lib.Flow,
  given: Mapping[int, jax.Array],
  model: roofline.Roofline,
  store: profile_store_lib.Store,
  rules: rules_lib.Rules = rules_lib.DEFAULT,
) -> measured_lib.Measurements:
  """Measures what is worth it; nothing is run if all is remembered.

  Args:
    flow: as recorded.
    given: its inputs and carried values.
    model: says what is worth measuring and what fits in memory.
    store: of earlier measurements.
    rules: from letters to mesh axes.
  """
  nodes = worth(flow, model)
  plans = {name: _Plan(flow, node, model) for name, node in nodes.items()}
  known = {name: store.get(plan.what) for name, plan in plans.items()}
  missing = {name for name, found in known.items() if found is None}
  if missing:
    bench = Bench(flow, given, model, rules)
    for name, found in bench.run({n: plans[n] for n in missing}):
      store.put(plans[name].what, found)
      known[name] = found
  return _tables(known)


def _tables(known) -> measured_lib.Measurements:
  """What was measured of each stage, as a model asks for it."""
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
      # The largest is all that there is room for: a call of its own.
      points = [*found['turns'], points[-1]]
      turns[key] = measured_lib.RowCurve(tuple(map(tuple, points)))
  return measured_lib.Measurements(
    curves, constants, turns, contention=contention
  )


def fits(flow: graph_lib.Flow) -> bool:
  """Whether one device has room for what is carried, and to work."""
  carried = sum(flow.values[start].bytes for start, _ in flow.carry)
  return carried <= FILL * machine_profile.memory()


def worth(
  flow: graph_lib.Flow, model: roofline.Roofline
) -> dict[str, graph_lib.Node]:
  """The stages that are worth measuring: each as its call with the most rows.

  Those of the host are, as nothing counts what they do.
  """
  one = plan_lib.Placement()
  spent, calls = {}, {}
  for node in flow.nodes:
    if graph_lib.is_plumbing(node) or node.stage.grain in count.ROUTING:
      continue
    if uses_up(node) and len(successors(flow, node)) < len(node.consumes):
      continue  # It could be called once, and then nothing would be left.
    seconds = model.seconds(flow, node, one, None)
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
  """Whether calling it leaves something else than there was: a simulator."""
  return bool(node.stage.host and node.consumes)


def successors(flow: graph_lib.Flow, node: graph_lib.Node) -> dict[int, int]:
  """What it returns, by number, to go on with in place of what it uses up."""
  kinds = [_kind(flow, v) for v in node.writes]
  found = {}
  for v in node.reads:
    if v in node.consumes and _kind(flow, v) in kinds:
      i = kinds.index(_kind(flow, v))
      found[v], kinds[i] = i, None
  return found


def sizes(rows: int, group: int, most: int) -> tuple[int, ...]:
  """Rows to measure: whole shares of all rows, from a group to `most` rows."""
  groups = rows // group
  shares = [n for n in range(1, groups + 1) if not groups % n]
  shares = [n for n in shares if n * group <= most] or shares[:1]
  middle = (shares[0] * shares[-1]) ** 0.5
  between = min(shares, key=lambda n: abs(n - middle))
  return tuple(n * group for n in sorted({shares[0], between, shares[-1]}))


class _Plan:
  """What to measure of a stage.

  Attributes:
    node: its call.
    rows: numbers of rows; a 0 where it has none.
    what: all that its seconds depend on.
  """

  def __init__(self, flow, node, model):
    self.node = node
    there, group = flow.rows_of(node), node.stage.group_size
    most = _most(flow, node, model)
    self.rows = sizes(there, group, most) if there else (0,)
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
  """The text of a stage, without what differs from process to process."""
  stage = node.stage
  if stage.host:
    return ADDRESS.sub('', '\n'.join(_python(stage.fn)))
  like = [
    jax.ShapeDtypeStruct(flow.values[v].shape, flow.values[v].dtype)
    for v in node.reads
  ]
  traced = stage.run.trace(*jax.tree.unflatten(node.takes, like))
  return ADDRESS.sub('', str(traced.jaxpr))


def _python(fn) -> Iterator[str]:
  """What Python runs on the host: its module's text, and what it is bound to.

  What it calls in other modules is not looked at.
  """
  while isinstance(fn, functools.partial):
    yield f'{fn.args} {fn.keywords}'
    fn = fn.func
  fn = inspect.unwrap(fn)
  if inspect.ismethod(fn):
    yield repr(fn.__self__)
  kind = fn if hasattr(fn, '__qualname__') else type(fn)
  yield f'{kind.__module__}.{kind.__qualname__}'
  with contextlib.suppress(OSError, TypeError):  # Typed in, or not Python.
    yield inspect.getsource(inspect.getmodule(kind))
  if inspect.isfunction(fn):
    yield str(inspect.getclosurevars(fn).nonlocals)


def _most(flow, node, model) -> int:
  """The most rows that memory has room for, as modeled."""
  there, call = flow.rows_of(node), model.works[node.name]
  if call is None:
    return there
  rows = there
  while rows > node.stage.group_size:
    if call.at(rows).bytes_alive <= FILL * model.capacity:
      break
    rows //= 2
  return rows


def resized(flow: graph_lib.Flow, node: graph_lib.Node, rows: int):
  """The flow as it would be if a node were given so many rows."""
  changed = node.rows
  if node.stage.grain == 'row':
    changed = changed | set(node.writes)
  values = list(flow.values)
  for v in changed:
    shape = (rows, *values[v].shape[1:])
    values[v] = dataclasses.replace(values[v], shape=shape)
  return dataclasses.replace(flow, values=tuple(values))


class Bench:
  """Runs a flow once on the first device and measures on the way.

  Attributes:
    places: the devices that measure at the same time.
    memory: what has been made so far, by value.
  """

  def __init__(self, flow, given, model, rules=rules_lib.DEFAULT):
    self.flow, self.model = flow, model
    self.places = [
      place_lib.Place(f'device {i}', plan_lib.Placement((i,)), {}, rules)
      for i in range(machine_profile.busy_devices())
    ]
    first = self.places[0]
    self.memory = {v: first.put(flow.values[v], x) for v, x in given.items()}
    self.last = {v: i for i, node in enumerate(flow.nodes) for v in node.reads}

  def run(self, plans: Mapping[str, _Plan]):
    """Yields the name of each stage, and what was measured of it.

    The measurement has 'points', seconds of a call on one device by its rows;
    'turns', seconds of one of several micro-batches by its rows; and
    'contention', how many times as long the last of these calls takes on all
    cores at once, None where devices share no cores.
    """
    if not plans:
      return
    nodes = {id(plan.node): name for name, plan in plans.items()}
    ends = max(i for i, n in enumerate(self.flow.nodes) if id(n) in nodes)
    for i, node in enumerate(self.flow.nodes[: ends + 1]):
      name = nodes.get(id(node))
      if name is not None:
        yield name, self._measured(node, plans[name].rows)
      if i < ends:
        self.make(node)
      for v in {*node.reads, *node.writes}:
        if self.last.get(v, -1) <= i:
          self.memory.pop(v, None)

  def _measured(self, node, rows):
    """What `run` yields of a node, at some numbers of rows."""
    there = self.flow.rows_of(node)
    several = node.stage.grain in ('row', 'sum') and not node.stage.host
    small = rows[:-1] if several else ()
    turns = [min(TURNS, there // n) for n in small]
    cases = [self.calls(node, n)[:1] for n in rows]
    cases += [
      self.calls(node, n * k, (self._in_turns(node, n),))
      for n, k in zip(small, turns, strict=True)
    ]
    if len(self.places) > 1 and not uses_up(node):
      cases.append(self.calls(node, rows[-1]))
    took = iter(call_timing.seconds(cases))
    points = [(n, next(took)) for n in rows]
    each = [(n, next(took) / k) for n, k in zip(small, turns, strict=True)]
    contention = machine_profile.slowdown(points[-1][1], *took)
    return {'points': points, 'turns': each, 'contention': contention}

  def _in_turns(self, node, rows: int) -> place_lib.Place:
    """The first device, where a node takes so many rows at a time."""
    rules = self.places[0].rules
    one = plan_lib.Placement((0,))
    return place_lib.Place('in turns', one, {node.name: rows}, rules)

  def calls(self, node, rows: int, places=None):
    """A call of a node on so many rows for every device; 0 if it has none."""
    flow = resized(self.flow, node, rows) if rows else self.flow
    if uses_up(node):
      return [functools.partial(self._step, flow, node, rows)]
    given = [self._first(v, node, rows) for v in node.reads]
    calls = []
    for place in places or self.places:
      there = [
        place.put(flow.values[v], x)
        for v, x in zip(node.reads, given, strict=True)
      ]
      calls.append(functools.partial(place.compile(flow, node), *there))
    return calls

  def _step(self, flow, node, rows):
    """Calls what uses up its token, and goes on with what it returns."""
    call = self.places[0].compile(flow, node, passed=())  # As in a program.
    made = call(*(self._first(v, node, rows) for v in node.reads))
    for v, i in successors(flow, node).items():
      rest = self.memory[v][len(made[i]) :]
      self.memory[v] = jnp.concatenate([made[i], rest])
    return made

  def _first(self, v, node, rows):
    x = self.memory[v]
    return x[:rows] if rows and v in node.rows else x

  def make(self, node):
    """What a node makes; of as many rows as fit, over and over."""
    there = self.flow.rows_of(node)
    most = _most(self.flow, node, self.model) if there else 0
    rows = max(sizes(there, node.stage.group_size, most)) if there else 0
    flow = resized(self.flow, node, rows) if rows else self.flow
    call = self.places[0].compile(flow, node)
    made = call(*(self._first(v, node, rows) for v in node.reads))
    if rows < there and node.stage.grain == 'row':
      made = [jnp.concatenate([x] * (there // rows)) for x in made]
    self.memory.update(zip(node.writes, made, strict=True))
