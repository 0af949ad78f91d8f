"""What plan a workflow should have on a cluster, and why; nothing is run."""

from collections.abc import Callable, Sequence
import json
import os
import pathlib

from planner import cluster as cluster_lib
from planner.costs import decode, roofline
from planner.counting import count
from planner.explain import account, listing, overview, words
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import unroll
from planner.search import algorithm1, exact, runners_up
from planner.search import space as space_lib
from planner.simulation import evaluate_plan
from rlinf_jax.report import plan_page
from sharding import rules

KEPT = 25  # Plans that were timed.


def advise(
  flows: tuple[graph.Flow, graph.Flow],
  ahead: int,
  own: plan_lib.Plan | None,
  *,
  cluster: cluster_lib.Cluster,
  lengths: Sequence[int] | None = None,
  seconds: float = 60.0,
  output: str | os.PathLike | None = None,
  page: str | os.PathLike | None = None,
  say: Callable[[str], None] = print,
) -> exact.Found:
  """Searches for the fastest plan and says why it is.

  Args:
    flows: of a step and of an evaluation, which is not planned.
    ahead: steps that may overlap, the workflow's lag.
    own: the plan that the recipe has; None if it has none.
    cluster: the hardware.
    lengths: tokens of completions like those that will be made; None where
      all are taken to be as long as there is room for.
    seconds: to search at most; what is then not proved is said. Two
      thirds as long again may go into what comes next and what would change
      the choice.
    output: a file for the same as JSON.
    page: a file for the same as a page of HTML, with pictures.
    say: what prints.
  """
  flow, _ = flows
  said, flow = str(flow), unroll.unroll(flow)  # Loops go by their rounds.
  works, assumed = _ending(count.of_flow(flow), lengths)
  model = roofline.Roofline(flow, works, cluster, rules.DEFAULT)
  space = space_lib.space(flow, model)
  found = exact.search(
    flow, model, space, ahead=ahead, keep=KEPT, seconds=seconds
  )
  lines = [said, '', _searched(found, cluster), assumed, _together(space)]
  ranked = runners_up.runners_up(
    flow, model, found, ahead=ahead, seconds=seconds / 6
  )
  twin = account.account(
    *(flow, model, found),
    others=_others(flow, model, space, own, ranked, ahead),
    ranked=ranked,
    ahead=ahead,
    seconds=seconds / 2,
  )
  if found.best is None and not twin['infeasible']:
    lines += [
      'No mesh of these devices can share the rows of every stage in whole '
      'groups: change the batch or its minibatches, or the devices.'
    ]
  elif found.best is None:
    lines += ['No plan fits in memory. The nearest to fitting:']
  else:
    lines += _found(flow, model, found, ahead, twin)
    # Evaluation has stages of its own: they go to the first place.
    twin['plan']['stages'][plan_lib.REST] = next(iter(found.best.places))
  lines += [f'  {entry["why"]}' for entry in twin['infeasible'][:3]]
  say('\n'.join(line for line in lines if line is not None))
  if output:
    pathlib.Path(output).write_text(json.dumps(twin, indent=2))
  if page:
    pathlib.Path(page).write_text(plan_page.text(twin), encoding='utf-8')
  return found


def read_lengths(file: str | os.PathLike) -> list[int]:
  """Tokens of completions, a JSON list in a file."""
  try:
    told = json.loads(pathlib.Path(file).read_text())
  except ValueError:
    told = None
  whole = isinstance(told, list) and all(type(n) is int for n in told)
  if not whole or not told or min(told) < 1:
    raise ValueError(
      f'{file} should hold the tokens of completions as a JSON list of whole '
      'numbers from 1 on, such as [212, 87, 1024].'
    )
  return told


def _ending(works, lengths):
  """Works of stages whose rows end when they do, and a sentence on that."""
  open_ended = {
    name: call.whole.turns
    for name, call in works.items()
    if call and call.whole.turns
  }
  names = ', '.join(open_ended)
  if lengths is None:
    if not open_ended:
      return works, None
    return works, (
      f'Rows of {names} are taken to be as long as there is room for, '
      f'{max(open_ended.values()):g} tokens: --lengths takes a file of how '
      'long they are.'
    )
  if not open_ended:
    raise ValueError(
      'Lengths were given, and no stage has rows that end early.'
    )
  barriers = [name for name in open_ended if not works[name].rows]
  if barriers:
    raise ValueError(
      f'Lengths were given, and {barriers[0]} ends when enough rows have, '
      'which lengths do not tell: plan it without them.'
    )
  ending = {name: decode.of(works[name], lengths) for name in open_ended}
  return works | ending, (
    f'Rows of {names} end as {len(lengths):,} that were given do, the longest '
    f'after {max(lengths):,} tokens.'
  )


def _others(flow, model, space, own, ranked, ahead):
  """Plans that people would ask about, by what they are called."""
  others = {}
  one = [plan for plan, _ in ranked if len(plan.places) == 1]
  if own:
    others["The recipe's own plan"] = own
  elif one:
    others['The fastest on one place'] = one[0]
  theirs = algorithm1.algorithm1(flow, model, space, ahead=ahead)
  if theirs.best:
    others["The plan of RLinf's Algorithm 1"] = theirs.best
  return others


def _found(flow, model, found, ahead, twin) -> list[str | None]:
  """The fastest plan, and what is next to it."""
  best = evaluate_plan.play(flow, model, found.best, ahead)
  return [
    f'The fastest takes {found.seconds:.3g} s a step:',
    overview.places(best.flow, found.best),
    '',
    overview.chart(best.flow, best.simulation),
    '',
    twin['bottleneck'],
    words.slack(twin),
    _between(best.flow, found.best),
    '',
    *words.next_to_it(twin),
    *words.beside(twin),
    '',
    'What would change the choice, one cost at a time:',
    *words.sensitivity(twin['sensitivity']),
  ]


def _searched(found, cluster) -> str:
  space = found.space
  proof = 'it is proved that none of the space is faster'
  if found.best is None:
    proof = 'it is proved that none fits' * (not found.gap) or 'time was up'
  elif found.gap:
    proof = f'none of the space can be more than {100 * found.gap:.1f} % faster'
  device = cluster.device
  return (
    f'{cluster.devices} × {device.name}, {listing.size(device.memory)} each. '
    f'Searched: up to {space.places} places in units of {space.unit} devices, '
    f'batches in {" or ".join(map(str, space.pieces))} pieces; '
    f'{found.simulated} plans simulated, {found.tried:,} bounded; {proof}.\n'
    'Seconds are modeled, from work counted and hardware as its gin file has '
    'it; none is measured.'
  )


def _together(space) -> str:
  """Which stages no plan of the space puts apart."""
  some = [' + '.join(stages) for stages in space.together]
  if not some:
    return ''
  return (
    f'Stages that take next to no time stay with others: {", ".join(some)}.\n'
  )


def _between(flow, plan) -> str | None:
  moved = overview.moved(flow, plan)
  return f'Between places go: {moved}.' if moved else None
