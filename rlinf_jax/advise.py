"""What plan a workflow should have on a cluster, and why; nothing is run."""

from collections.abc import Callable
import functools
import json
import os
import pathlib

from planner import cluster as cluster_lib
from planner import explain, graph, listing, passes, simulate
from planner import plan as plan_lib
from planner.costs import count, roofline
from planner.search import exact, grouping
from sharding import rules

PIECES = (1, 2, 4, 8)
FRACTIONS = (1, 4, 16, 64)  # Of a stage's rows, taken at a time.


def space(flow: graph.Flow, model, cluster: cluster_lib.Cluster):
  """The plans that are worth a look: whole nodes where there are several."""
  several = cluster.devices > cluster.node
  # A micro-batch is for memory: only where a whole batch would not fit.
  rows = {
    node.name: options
    for node in flow.nodes
    if (options := _micro_batches(flow, node, model, cluster))
  }
  return exact.Space(
    cluster.devices,
    unit=cluster.node if several else 1,
    pieces=PIECES,
    rows=rows,
    evict=_idle(flow),
    together=grouping.glue(flow, model, cluster.devices),
  )


def _micro_batches(flow, node, model, cluster) -> tuple[int | None, ...]:
  stage = node.stage
  if stage.grain not in ('row', 'sum') or stage.host or not node.rows:
    return ()
  work = model.works[node.name]
  if work.at(count.rows_of(flow, node)).bytes_alive < cluster.capacity / 8:
    return ()
  rows = count.rows_of(flow, node)
  fitting = [
    rows // n for n in FRACTIONS if not rows % n and not rows // n % stage.group
  ]
  return (None, *fitting[1:])


def _idle(flow) -> tuple[str, ...]:
  """Stages that alone read something carried: they could do without it."""
  names = {}
  for start, _ in flow.carry:
    readers = {flow.nodes[i].name for i in flow.readers.get(start, ())}
    if len(readers) == 1:
      (name,) = readers
      names[name] = names.get(name, 0) + flow.values[start].bytes
  most = max(names.values(), default=0)
  return tuple(n for n in flow.stages if names.get(n, 0) > most / 100)


def advise(
  flow: graph.Flow,
  ahead: int,
  own: plan_lib.Plan,
  *,
  cluster: cluster_lib.Cluster,
  seconds: float = 60.0,
  output: str | os.PathLike | None = None,
  say: Callable[[str], None] = print,
) -> exact.Found:
  """Searches for the fastest plan and says why it is.

  Args:
    flow: of a step.
    ahead: steps that may overlap, the workflow's lag.
    own: the plan that the recipe has.
    cluster: the hardware.
    seconds: to search at most; what is then not proved is said.
    output: a file for the same as JSON.
    say: what prints.
  """
  model = roofline.Roofline(flow, count.of_flow(flow), cluster, rules.DEFAULT)
  where = space(flow, model, cluster)
  found = exact.search(flow, model, where, ahead=ahead, seconds=seconds)
  lines = [str(flow), '', _searched(where, found, cluster)]
  twin = {'space': json.loads(where.to_json()), 'ranked': []}
  if found.best is None:
    lines += ['No plan fits in memory. The nearest to fitting:']
  else:
    play = functools.partial(_play, flow, model, ahead=ahead)
    cut, played = play(found.best)
    lines += [
      f'The fastest takes {found.seconds:.3g} s a step:',
      explain.places(cut, found.best),
      '',
      explain.chart(cut, played),
      '',
      explain.bottleneck(cut, played),
      _between(cut, found.best),
      '',
      *_ranked(flow, found),
      _own(own, found, play, cluster),
    ]
    twin |= explain.to_json(cut, found.best, played)
    # Evaluation has stages of its own: they go to the first place.
    twin['plan']['stages'][plan_lib.REST] = next(iter(found.best.places))
    twin['ranked'] = [
      {'plan': json.loads(p.to_json()), 'seconds': s} for p, s in found.ranked
    ]
  lines += [f'  {words}' for _, words in found.infeasible[:3]]
  say('\n'.join(line for line in lines if line is not None))
  if output:
    pathlib.Path(output).write_text(json.dumps(twin, indent=2))
  return found


def _play(flow, model, plan, ahead):
  """Simulates a plan by the model."""
  cost = Priced(model, plan)
  cut, programs = passes.lower(flow, plan, cost)
  return cut, simulate.simulate(cut, programs, cost, ahead=ahead)


class Priced:
  """A model's costs under one plan."""

  def __init__(self, model, plan: plan_lib.Plan):
    self._model, self._plan = model, plan

  def seconds(self, flow, node, place):
    rows = None
    if not graph.is_plumbing(node):
      rows = self._plan.rows.get(node.name)
    return self._model.seconds(flow, node, self._plan.places[place], rows)

  def transfer(self, flow, value, source, target):
    places = self._plan.places
    return self._model.transfer(flow, value, places[source], places[target])

  def switch(self, flow, value, place):
    return self._model.switch(flow, value, self._plan.places[place])


def _searched(where, found, cluster) -> str:
  proof = 'it is proved that none of the space is faster'
  if found.best is None:
    proof = 'it is proved that none fits' * (not found.gap) or 'time was up'
  elif found.gap:
    proof = f'none of the space can be more than {100 * found.gap:.1f} % faster'
  device = cluster.device
  return (
    f'{cluster.devices} × {device.name}, {listing.size(device.memory)} each. '
    f'Searched: up to {where.places} places in units of {where.unit} devices, '
    f'batches in {" or ".join(map(str, where.pieces))} pieces; '
    f'{found.simulated} plans simulated, {found.tried:,} bounded; {proof}.\n'
    'Seconds are modelled, from work counted and hardware as its gin file has '
    'it; none is measured.\n'
  )


def _between(flow, plan) -> str | None:
  moved = explain.moved(flow, plan)
  return f'Between places go: {moved}.' if moved else None


def _ranked(flow, found) -> list[str]:
  lines = ['Next to it:'] if len(found.ranked) > 1 else []
  for plan, seconds in found.ranked[1:]:
    more = 100 * (seconds / found.seconds - 1)
    lines.append(f'  +{more:.1f} %  {explain.in_a_line(flow, plan)}')
  return lines


def _own(own, found, play, cluster) -> str:
  """How the recipe's plan compares."""
  most = max(d for place in own.places.values() for d in place.devices)
  if most >= cluster.devices:
    return f"The recipe's own plan needs device {most}, which is not there."
  try:
    _, played = play(own)
  except ValueError as error:
    return f"The recipe's own plan cannot be had: {error}"
  more = 100 * (played.period / found.seconds - 1)
  return f"The recipe's own plan takes {played.period:.3g} s, {more:+.1f} %."
