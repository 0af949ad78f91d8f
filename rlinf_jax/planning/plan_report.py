"""Finds the fastest plan of a workflow on a cluster and explains it.

Nothing is run: costs are modeled. The plan can be compiled, though, for devices
that need not be here.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import os
import types

import jax

from planner import cluster as cluster_lib
from planner import formatting
from planner.costs import cost_table, roofline
from planner.costs import measured as measured_lib
from planner.counting import count
from planner.explain import offload, overview, plan_data, remat, report_text
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import passes, unroll
from planner.search import deadline as deadline_lib
from planner.search import result as result_lib
from planner.simulation import evaluate_plan
from rlinf_jax.planning import (
  answer_times,
  collector,
  completion_lengths,
  evaluation_plan,
  remedies,
  searches,
)
from rlinf_jax.planning.compiled import less_memory, plan_compiler
from rlinf_jax.planning.compiled import report as compiled_report
from rlinf_jax.planning.compiled import topology as topology_lib
from rlinf_jax.planning.profiling import host_timing
from rlinf_jax.report import plan_page
from rlinf_jax.runtime import flows as flows_lib
from rlinf_jax.system import whole_file
from sharding import rules

TOO_LARGE = 'Plans that do not fit in memory, as it is modeled or compiled:'
ALGORITHM1 = "The plan of RLinf's Algorithm 1"


def report_plan(
  flows: tuple[graph.Flow, graph.Flow],
  staleness: int,
  own: plan_lib.Plan | None,
  *,
  cluster: cluster_lib.Cluster,
  lengths: Sequence[int] | None = None,
  answer_seconds: tuple[float, ...] = (),
  host_seconds: Mapping[str, float] = types.MappingProxyType({}),
  seconds: float = 60.0,
  compile_for: topology_lib.Topology | None = None,
  compile_runners_up: int = 0,
  output: str | os.PathLike | None = None,
  page: str | os.PathLike | None = None,
  print_text: Callable[[str], None] = print,
) -> result_lib.SearchResult:
  """Searches for the fastest plan, and prints it with the reasons for it.

  Args:
    flows: recordings of a step, which is planned, and of an evaluation, of
      which the report says whether the plan can run it, and has room for it.
    staleness: the workflow's staleness, in steps: so many steps may overlap.
    own: the plan of the recipe; None if it has none.
    cluster: the hardware.
    lengths: tokens of completions like those that will be generated; None where
      all completions are assumed to have the maximum length.
    answer_seconds: seconds that environments took to answer turns, like those
      of training; none where they were not measured.
    host_seconds: measured seconds of a row of host stages, such as simulators;
      those of others are found here, where they can be, or assumed.
    seconds: limit of the whole report, without the compilation of plans, in
      seconds of a processor. The `searches` take up to nine tenths of what
      counting leaves, and the costs that would change the choice have the rest.
      The report says what is not proved by then.
    compile_for: the devices that plans are compiled for, after
      `topology.prepare`, until the compiler accepts one; None to compile
      nothing.
    compile_runners_up: slower plans to compile, too, until the compiler has
      accepted so many.
    output: a file for the report as JSON.
    page: a file for the report as a page of HTML, with charts.
    print_text: prints the report.
  """
  deadline = deadline_lib.Deadline(seconds)
  table, (flow, evaluation) = str(flows[0]), map(unroll.unroll, flows)
  model, assumptions = _cost_model(
    flow, cluster, lengths, answer_seconds, host_seconds
  )
  waits = answer_times.describe(flow, answer_seconds)
  result, ranked, theirs = searches.compare(flow, model, staleness, deadline)
  lines = [table, '', _searched(result, cluster), *assumptions, waits]
  lines += [_attention(flow, cluster)]
  others = _others(result, own, ranked, theirs)
  compiled = nearest = None
  if compile_for and result.best:
    left = deadline.left
    result, ranked, others, compiled, nearest = _compile(
      flow,
      model,
      result,
      ranked,
      others,
      compile_for,
      compile_runners_up,
      print_text,
      staleness,
    )
    deadline = deadline_lib.Deadline(left)
  chosen, notice = result.best, None
  if chosen:
    chosen, notice = evaluation_plan.fit(
      chosen, flow, evaluation, model, deadline
    )
  kwargs = {'others': others, 'ranked': ranked, 'staleness': staleness}
  data = plan_data.plan_data(flow, model, result, deadline=deadline, **kwargs)
  data |= {'compiled': compiled} if compiled else {}
  data |= {'answers_measured': waits} if waits else {}
  data |= {'evaluations': notice} if notice else {}
  lines += [_turns(result), _colocated(result.space)]
  if result.best is None:
    data['shortage'] = _shortage(flow, model, result, compiled, nearest)
    lines += [_no_plan(data, _too_many_devices(flow, model))]
  else:
    lines += _fastest(flow, model, result, staleness, data)
    cost = cost_table.CostTable(model, chosen)
    chosen = passes.with_order(flows[0], chosen, cost)
    data['plan'] = json.loads(chosen.to_json())
    lines += [TOO_LARGE] * bool(data['infeasible'])
  lines += [f'  {entry["reason"]}' for entry in data['infeasible'][:3]]
  lines += report_text.shortage(data)
  print_text('\n'.join(line for line in lines if line is not None))
  if output:
    whole_file.write_text(output, json.dumps(data, indent=2))
  if page:
    whole_file.write_text(page, plan_page.text(data))
  return result


def _cost_model(flow, cluster, lengths, answer_seconds, host_seconds):
  """Counts the work of stages, and times those on the host.

  Returns:
    The cost model, and sentences on what it assumes; None in place of one that
    there is no need for.
  """
  with collector.only_young():
    works = count.of_flow(flow, platform=cluster.device.platform)
  works, assumption = completion_lengths.with_lengths(works, lengths)
  host_timing.check(flow, host_seconds)
  timed = host_timing.seconds_per_row(flow)
  timed = {k: x for k, x in timed.items() if k not in host_seconds}
  known = measured_lib.Measurements(
    host_rows=timed | dict(host_seconds), answers=answer_seconds
  )
  model = roofline.Roofline(flow, works, cluster, rules.DEFAULT, known)
  return model, [assumption, host_timing.describe(timed, host_seconds)]


def _attention(flow, cluster) -> str | None:
  """Names what computes attention on the devices; None without attention."""
  platform = cluster.device.platform or jax.default_backend()
  found = flows_lib.attention(flow, platform)
  return f'Attention: {found}.' if found else None


def _compile(
  flow, model, result, ranked, others, topology, count, print_text, staleness
):
  """Compiles plans until one is accepted, then `count` of those that follow.

  Those that are refused are dropped, but for the nearest to fitting of them.
  """
  compiler = plan_compiler.PlanCompiler(
    flow, model, topology_lib.devices(topology), print_text
  )
  choice = plan_compiler.first_accepted(
    compiler,
    result,
    ranked,
    lambda plan, stage: less_memory.alternatives(
      flow, model, result, plan, stage, staleness
    ),
  )
  choice = plan_compiler.with_runners_up(compiler, choice, count)
  refused = [plan for plan, _ in choice.refused]
  refused += [plan for plan, _, found in choice.runners_up if found.refusal]
  others = {title: p for title, p in others.items() if p not in refused}
  compiled = compiled_report.to_data(
    choice.compiled or plan_compiler.CompiledPlan([]),
    topology,
    choice.refused,
    [
      (
        overview.one_line(flow, plan),
        seconds / choice.result.seconds - 1,
        found,
      )
      for plan, seconds, found in choice.runners_up
    ],
  )
  return choice.result, choice.ranked, others, compiled, choice.nearest


def _others(result, own, ranked, theirs):
  """Returns plans to compare with the best one, by title."""
  if result.best is None:
    return {}
  others = {}
  single_place = [plan for plan, _ in ranked if len(plan.places) == 1]
  if own:
    others["The recipe's own plan"] = own
  elif single_place and result.gap < 1:  # Else there is no other.
    others['The fastest on one place'] = single_place[0]
  if theirs is None:
    others[ALGORITHM1] = None
  elif theirs.best:
    others[ALGORITHM1] = theirs.best
  return others


def _fastest(flow, model, result, staleness, data) -> list[str | None]:
  """Describes the fastest plan and compares it with others."""
  best = evaluate_plan.evaluate(flow, model, result.best, staleness)
  if model.measured.answers:
    waiting = answer_times.waiting(best.flow, best.simulation)
    data['answers'] = answer_times.share(waiting, result.seconds)
    data['waiting'] = waiting
  which = 'This plan' if result.gap == 1 else 'The fastest plan'
  return [
    f'{which} takes {formatting.digits(result.seconds)} s a step. '
    f'{report_text.known(data["known"])}',
    data.get('evaluations'),
    *report_text.guess(data),
    overview.places(best.flow, result.best),
    '',
    overview.chart(best.flow, best.simulation),
    '',
    data['bottleneck'],
    data.get('answers'),
    report_text.slack(data),
    *remat.text(data['remat']),
    *offload.text(data['offload']),
    _transfers(best),
    '',
    *compiled_report.text(data.get('compiled')),
    *report_text.runners_up(data),
    *report_text.comparisons(data),
    '',
    'Whether another plan would be the fastest if one cost were different:',
    *report_text.sensitivity(data),
  ]


def _shortage(
  flow, model, result, compiled, nearest
) -> dict[str, str | list[str]]:
  """Explains what the plan that is nearest to fitting lacks, for JSON.

  If plans were compiled, it is `nearest`, of `plan_compiler.Choice`.
  """
  refused = None
  if nearest:
    plan, found = nearest
    refused = remedies.Refused(found.refused, found.lacks)
  elif compiled or not result.infeasible:
    return {}
  else:
    plan, _ = result.infeasible[0]
  lacks, bindings = remedies.shortage(flow, model, plan, refused)
  return {'lacks': lacks, 'bindings': bindings}


def _too_many_devices(flow, model) -> str:
  """Says that no plan has one place, if no mesh of all devices divides rows."""
  devices = model.cluster.num_devices
  if model.axes(tuple(flow.stages), devices):
    return ''
  return (
    f'No mesh of all {devices:,} devices can divide the rows of every stage '
    'into whole groups, so that each plan has several places: a larger batch '
    'or fewer devices are planned sooner.'
  )


def _no_plan(data, too_many: str) -> str:
  """Says why there is no plan, and whether that is proved."""
  nearest = 'The nearest to fitting:' if data['infeasible'] else ''
  if data.get('compiled'):
    return (
      'The compiler refused every plan that the search found; it is not proved '
      'that it would refuse the others.'
    )
  if not data['searched']['proved']:
    return (
      'No plan was found in the time limit, and it is not proved that there is '
      'none: the search was stopped, and --plan_seconds gives it more. '
      f'{" ".join(filter(None, (too_many, nearest)))}'.rstrip()
    )
  if nearest:
    return (
      'No plan fits in memory: proved for every plan of this space, as memory '
      f'is modeled. {nearest}'
    )
  return (
    'No mesh of these devices can divide the rows of every stage into whole '
    'groups: change the batch, its minibatches or the devices.'
  )


def _searched(result, cluster) -> str:
  """Says what was searched, and what the search proves."""
  space = result.space
  proof = 'no plan of this space is faster (proved)'
  more = '--plan_seconds gives the search more time'
  if result.best is None:
    proof = 'no plan fits (proved)'
    if not result.proved:
      proof = f'time was up, and nothing is proved: {more}'
  elif result.gap == 1:
    proof = f'time was up before anything was proved: {more}'
  elif result.gap:
    proof = (
      'no plan of this space can be more than '
      f'{report_text.at_most(result.gap)} faster; the search was stopped: '
      f'{more}'
    )
  device = cluster.device
  memory = formatting.byte_size(device.memory_bytes)
  return (
    f'{cluster.num_devices} × {device.name}, {memory} each. '
    f'Searched: up to {space.max_places} places in units of '
    f'{space.unit} device{"s" * (space.unit > 1)}, '
    f'batches in {formatting.choices(space.pieces)} '
    f'piece{"s" * (max(space.pieces) > 1)}; '
    f'plans simulated: {result.simulated}, lower bounds computed: '
    f'{result.tried:,}; {proof}.\n'
    "Seconds are modeled from each stage's work and the cluster file, unless "
    'this report says otherwise.'
  )


def _turns(result) -> str | None:
  """Says that a plan in which two meshes take turns was not searched for."""
  if result.best is None or not result.best.shared_devices:
    return None
  places = ' and '.join(result.best.shared_devices)
  text = (
    f'The plan below is outside of this space: places {places} take turns on '
    'the same devices, with a mesh each.'
  )
  others = [n for plan, n in result.ranked if not plan.shared_devices]
  if others:
    faster = 1 - result.seconds / others[0]
    text += f' It is {faster:.1%} faster than the fastest plan without that.'
  return text


def _colocated(space) -> str:
  """Says which stages share a place in every plan of the space."""
  some = [' + '.join(stages) for stages in space.colocated]
  if not some:
    return ''
  return f'Placed together, as some are short: {", ".join(some)}.\n'


def _transfers(evaluation) -> str | None:
  transfers = overview.transfers(evaluation)
  return f'Transfers between places: {transfers}.' if transfers else None
