"""A report of a plan that was compiled: text, JSON and page."""

import json

import pytest

import matrices
from planner import cluster as cluster_lib
from rlinf_jax.config import config_values
from rlinf_jax.planning import plan_report
from rlinf_jax.planning.compiled import plan_compiler
from rlinf_jax.planning.compiled import topology as topology_lib


def reported(folder, runners_up=0):
  device = cluster_lib.Device('toy', {'float32': 1e10}, 1e9, 1e6, 1e10, 5e9)
  link = cluster_lib.Link(1e-5, 1e10)
  lines = []
  found = plan_report.report_plan(
    (matrices.flow(), matrices.flow()),
    staleness=0,
    own=None,
    cluster=cluster_lib.Cluster(device, 2, 2, link, link),
    compile_for=topology_lib.parse('cpu:2'),
    compile_runners_up=runners_up,
    output=folder / 'plan.json',
    page=folder / 'plan.html',
    print_text=lines.append,
  )
  data = json.loads((folder / 'plan.json').read_text())
  return found, '\n'.join(lines), data, (folder / 'plan.html').read_text()


def test_the_chosen_plan_is_compiled_and_reported(tmp_path):
  found, text, data, page = reported(tmp_path)
  assert found.best and 'Compiled gradient in' in text
  assert 'Compiled for cpu:2' in text and 'tagged compiled' in text
  compiled = data['compiled']
  assert [s['name'] for s in compiled['stages']] == ['gradient', 'apply']
  assert not compiled['refused']
  for stage in compiled['stages']:
    memory = stage['memory']
    assert memory['total'] == memory['needed'] + memory['others']
    assert memory['usable'] == 0.9e6  # A tenth of each device is in reserve.
    assert stage['name'] in page
  assert 'Compiled for cpu:2' in page and 'tag compiled' in page
  header, *rows = text.partition('modeled numbers:\n')[2].splitlines()[:3]
  assert header.split()[6:9] == ['total', 'usable', 'modeled']
  end = header.index('usable') + len('usable')
  assert all(row[:end].endswith(' 879 KiB') for row in rows)
  assert '<th>total</th><th>usable</th>' in page and '879 KiB</td>' in page


def test_a_plan_that_the_compiler_refuses_is_listed_and_the_next_one_chosen(
  tmp_path, monkeypatch
):
  first = reported(tmp_path)[0]
  compile = plan_compiler.PlanCompiler.compile

  def refuse_first(self, plan):
    if plan == first.best:
      return plan_compiler.CompiledPlan([], 'Ran out of memory: 2 of 1 GB.')
    return compile(self, plan)

  monkeypatch.setattr(plan_compiler.PlanCompiler, 'compile', refuse_first)
  found, text, data, page = reported(tmp_path)
  assert found.best != first.best and found.seconds >= first.seconds
  assert found.gap == pytest.approx(1 - first.bound / found.seconds)
  assert data['infeasible'][0]['reason'] == 'Ran out of memory: 2 of 1 GB.'
  assert 'The compiler refused a faster plan: Ran out of memory' in text
  assert 'Ran out of memory: 2 of 1 GB.' in page


def test_plans_after_the_fastest_are_compiled_if_asked_for(
  tmp_path, monkeypatch
):
  """A refused one is no longer ranked, and the next one is compiled."""
  first, _, data, _ = reported(tmp_path)
  assert data['compiled']['runners_up'] == []
  second = first.ranked[1][0]
  compile = plan_compiler.PlanCompiler.compile

  def refuse_second(self, plan):
    if plan == second:
      return plan_compiler.CompiledPlan([], 'Ran out of <memory>.')
    return compile(self, plan)

  monkeypatch.setattr(plan_compiler.PlanCompiler, 'compile', refuse_second)
  found, text, data, page = reported(tmp_path, runners_up=1)
  assert found.best == first.best
  assert second not in [plan for plan, _ in found.ranked]
  assert (second, 'Ran out of <memory>.') in found.infeasible
  refused, accepted = data['compiled']['runners_up']
  assert refused['refusal'] == 'Ran out of <memory>.' and not refused['stages']
  assert accepted['refusal'] is None
  assert [s['name'] for s in accepted['stages']] == ['gradient', 'apply']
  assert not data['compiled']['refused']
  assert 'A slower plan was refused: Ran out of <memory>.' in text
  line = f'{100 * accepted["relative_slowdown"]:+.1f} %  {accepted["summary"]}'
  assert f'A slower plan, compiled: {line}' in text
  assert 'A slower plan, refused' in page and 'of &lt;memory&gt;.' in page
  assert 'A slower plan, as compiled' in page


def test_a_cluster_without_a_plan_that_compiles_says_why(tmp_path, monkeypatch):
  refusal = plan_compiler.CompiledPlan([], 'Ran out of memory: 2 of 1 GB.')
  monkeypatch.setattr(
    plan_compiler.PlanCompiler, 'compile', lambda self, plan: refusal
  )
  found, text, data, page = reported(tmp_path)
  assert found.best is None and 'plan' not in data
  assert 'Refused: Ran out of memory' in text and 'nothing is proved' in page
  assert data['shortage'] == {}  # It gave no number of bytes.


def test_if_all_plans_are_refused_it_says_what_the_nearest_of_them_lacks(
  tmp_path, monkeypatch
):
  """The second of them, of 64 bytes, which more devices would save."""
  tried = []

  def refuse(self, plan):
    tried.append(plan)
    lacks = 64.0 if len(tried) == 2 else 2.0**20
    words = f'Ran out of memory: {len(tried)}.'
    return plan_compiler.CompiledPlan([], words, 'gradient', lacks)

  monkeypatch.setattr(plan_compiler.PlanCompiler, 'compile', refuse)
  monkeypatch.setattr(
    config_values,
    'read_numbers',
    lambda name: {'cluster.Cluster.num_devices': 2} if 'num' in name else {},
  )
  found, text, data, page = reported(tmp_path)
  assert found.best is None and len(tried) > 2
  lacks, bindings = data['shortage']['lacks'], data['shortage']['bindings']
  place = tried[1].stages['gradient']
  start = f'{place} lacks 64 B on each device during gradient, as compiled; '
  assert lacks.startswith(start) and 'activations' in lacks
  (more,) = bindings
  assert more.startswith('cluster.Cluster.num_devices above 2 shares memory')
  assert f'Of the nearest, {lacks}' in text and more in text
  assert lacks in page and more in page
