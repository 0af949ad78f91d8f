import dataclasses
import functools
import html.parser
import json

import pytest

from planner import cluster as cluster_lib
from planner.costs import measured, roofline
from planner.counting import count
from planner.ir import plan as plan_lib
from planner.search import deadline as deadline_lib
from planner.search import exact
from planner.search.plans import space as space_lib
from rlinf_jax.planning import plan_report, searches
from rlinf_jax.planning.compiled import topology
from rlinf_jax.report import plan_page
from rlinf_jax.report.html import terms
from rlinf_jax.runtime import programs
from sharding import rules
from stages import workflows
from stages.learn import optimizers
import tiny
import toys


def cluster(devices=2, memory=4e9, node=2):
  device = cluster_lib.Device(
    'toy', {'float32': 1e10}, 1e9, memory, 1e10, 5e9, launch_seconds=1e-4
  )
  fast, slow = cluster_lib.Link(1e-5, 1e10), cluster_lib.Link(1e-4, 1e9)
  return cluster_lib.Cluster(device, devices, node, fast, slow)


def grpo(reward=tiny.even_on_host):
  return workflows.grpo(
    tiny.policy(), reward, optimizers.adamw(1e-2), group_size=4, kl_coef=0.1
  )


@functools.cache
def flows():
  workflow = grpo()
  problem = tiny.problem()
  return tiny.trace(workflow, problem), tiny.trace_evaluation(workflow, problem)


def flow():
  return flows()[0]


def reported(tmp_path, lengths=None, seconds=60.0, compile_for=None, **kwargs):
  printed = []
  file = tmp_path / 'plan.json'
  own = plan_lib.parse({}, flow().stages)
  found = plan_report.report_plan(
    flows(),
    staleness=0,
    own=own,
    cluster=cluster(**kwargs),
    lengths=lengths,
    seconds=seconds,
    compile_for=compile_for,
    output=file,
    page=tmp_path / 'plan.html',
    print_text=printed.append,
  )
  return found, '\n'.join(printed), json.loads(file.read_text())


@pytest.fixture(scope='module')
def roomy(tmp_path_factory):
  """A report of a cluster in which everything fits: plan, text, JSON, page."""
  folder = tmp_path_factory.mktemp('roomy')
  return *reported(folder), (folder / 'plan.html').read_text()


@pytest.mark.slow
def test_it_names_the_fastest_plan_the_next_and_the_recipes_own(roomy):
  found, printed, data, _ = roomy
  assert found.gap == 0 and '(proved)' in printed
  assert f'The fastest plan takes {found.seconds:.3g} s a step' in printed
  for words in (
    'generate',
    '2 × toy',
    'modeled',
    "The recipe's own plan",
    'batches in 1, 2, 4 or 8 pieces;',
  ):
    assert words in printed
  stages = plan_lib.parse(data['plan']).stages
  assert stages == found.best.stages | {'answer': 'all', 'score': 'all'}
  seconds = [entry['seconds'] for entry in data['ranked']]
  assert seconds == sorted(seconds) and seconds[0] == found.seconds


@pytest.mark.slow
def test_a_page_says_no_more_than_the_search_has_proved(roomy):
  data = dict(
    roomy[2], alternatives=[dict(a) for a in roomy[2]['alternatives']]
  )
  own = data['alternatives'][0]
  own |= {'seconds': 0.5 * data['seconds'], 'relative_slowdown': -0.5}
  for gap, words in (
    (1.0, 'nothing is proved of it'),
    (0.5, 'at most 100.0 % slower than the fastest'),
    (1e-5, 'at most 0.1 % slower than the fastest'),
  ):
    data['searched'] = data['searched'] | {'gap': gap}
    shown = ' '.join(Reader(plan_page.text(data)).words)
    assert words in shown
    assert ('The fastest plan ' in shown) == (gap < 1)
    assert '-50.0 %' in shown and '+-' not in shown
    assert "100% more than the recipe's own plan" in shown


class Reader(html.parser.HTMLParser):
  """Checks that what begins ends, and collects what is said."""

  def __init__(self, text):
    super().__init__()
    self.open, self.tags, self.words = [], [], []
    self.feed(text)
    assert not self.open

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    if tag not in ('meta', 'link', 'br'):
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_startendtag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))

  def handle_data(self, data):
    self.words.append(data)


@pytest.mark.slow
def test_it_accounts_for_a_plan_in_words_in_json_and_on_a_page(roomy):
  found, printed, data, text = roomy
  page = Reader(text)
  shown = ' '.join(page.words)
  for stage in data['stages']:
    assert stage['slack'] >= 0 and stage['name'] in printed
    assert stage['name'] in shown
  assert sum(tag == 'svg' for tag, _ in page.tags) >= 2  # The recipe's, too.
  assert not any(tag == 'script' for tag, _ in page.tags)
  for _, attrs in page.tags:  # It opens without a network.
    assert not {'src', 'href'} & attrs.keys() or attrs['href'] == 'data:,'
  for place in data['places']:
    parts = sum(part['bytes'] for part in place['memory']['parts'])
    assert parts == pytest.approx(place['memory']['bytes'])
    assert place['busy_seconds'] <= found.seconds * (1 + 1e-9)
  for entry in data['ranked']:
    assert entry['reason'] in printed + 'the fastest'
    seconds = sum(entry['parts'][k] for k in ('work', 'waits', 'moves'))
    assert seconds == pytest.approx(entry['seconds'])
  assert {c['cost'] for c in data['sensitivity']} >= {*found.best.stages}
  assert 'by a tenth' in printed and 'by a tenth' in shown
  shares = data['known']
  assert sum(shares.values()) == pytest.approx(1)
  # The reward is timed.
  assert 0 < shares['measured'] < 1 and 'Timed on this machine' in printed
  for share in shares.values():
    assert f'{100 * share:.0f} %' in printed and f'{100 * share:.0f} %' in shown
  assumed = {s['name'] for s in data['stages'] if s['tag'] == 'assumed'}
  for change in data['sensitivity']:
    assert (change['factor'] in (10, 0.1)) == (change['cost'] in assumed)
  assert ('This choice is a guess' in printed) == bool(data['guesses'])
  said = {attrs['title'] for tag, attrs in page.tags if tag == 'abbr'}
  assert {terms.MEANINGS[x] for x in ('stage', 'piece', 'grain')} <= said
  assert 'modeled' in shown
  for other in data['alternatives']:
    assert other['title'] in printed and other['title'] in shown
    assert other['seconds'] >= found.seconds
  assert "RLinf's Algorithm 1" in printed


@pytest.mark.slow
def test_the_plan_that_it_finds_can_be_given_to_a_run(roomy):
  _, _, data, _ = roomy
  names = [*flow().stages, 'answer', 'score']  # Of an evaluation as well.
  parsed = plan_lib.parse(data['plan'], names)
  assert set(parsed.stages) == {*flow().stages, 'answer', 'score'}
  assert bool(parsed.order) == (len(parsed.places) > 1)
  programs.lower(parsed, flow())  # Its order is one of this step.


@pytest.mark.slow
def test_completions_end_as_they_are_said_to(roomy, tmp_path):
  full, printed, data, _ = roomy
  assert '--lengths takes a file' in printed
  found, printed, other = reported(tmp_path, lengths=[1, 2, 1])
  assert 'Rows of generate have the 3 lengths' in printed
  assert found.seconds < full.seconds

  def generate(data):
    (stage,) = (x for x in data['stages'] if x['name'] == 'generate')
    return stage['seconds']

  assert generate(other) < 0.7 * generate(data)


def test_a_report_takes_over_algorithm_1s_plan_unless_the_search_is_proved():
  flow, model = toys.ppo(staleness=1, power=0.3, meshes=2)
  space = space_lib.Space(64, unit=8, max_places=2, pieces=(1, 2, 4))
  search = functools.partial(exact.search, flow, model, space, staleness=1)
  none, stopped, proved = (
    search(deadline=toys.deadline(checks)) for checks in (0, 1000, 10**9)
  )
  theirs = searches._algorithm1(flow, model, none, 1, deadline_lib.NEVER)
  assert none.simulated == 1 and theirs.seconds < 0.7 * stopped.seconds
  for before in (none, stopped):
    found, ranked = searches._adopt(before, before.ranked, theirs)
    assert (found.best, found.seconds) == (theirs.best, theirs.seconds)
    assert ranked[0] == (theirs.best, theirs.seconds)
    assert found.bound == pytest.approx(found.seconds * (1 - found.gap))
    assert found.bound <= proved.seconds <= found.seconds
  found, _ = searches._adopt(proved, proved.ranked, theirs)
  assert found is proved


@pytest.mark.slow
def test_what_does_not_fit_is_told_by_the_inequality(tmp_path):
  found, printed, data = reported(tmp_path, memory=1e4)
  assert found.best is None and data['searched']['proved']
  assert 'No plan fits in memory: proved' in printed and 'too much' in printed
  assert 'lacks' in data['shortage']['lacks']
  shown = Reader((tmp_path / 'plan.html').read_text()).words
  assert 'no plan fits' in shown


def test_a_search_without_time_proves_nothing(tmp_path):
  found, printed, data = reported(tmp_path, memory=1e4, seconds=0.0)
  assert found.best is None and not data['searched']['proved']
  assert 'time was up, and nothing is proved' in printed
  assert 'it is not proved that there is none' in printed
  assert 'fits' not in printed
  shown = Reader((tmp_path / 'plan.html').read_text()).words
  assert 'no plan was found, and nothing is proved' in shown


@pytest.mark.parametrize('devices', [2, 7])
def test_a_search_without_time_says_if_all_devices_have_no_mesh(
  devices, tmp_path
):
  """Seven devices cannot divide the batch, so that no plan has one place."""
  found, printed, _ = reported(
    tmp_path, memory=1e4, seconds=0.0, devices=devices, node=devices
  )
  assert found.best is None
  why = f'No mesh of all {devices} devices can divide the rows'
  assert (why in printed) == (devices == 7)


def test_a_compiler_that_was_given_no_plan_refuses_none(tmp_path):
  _, printed, data = reported(
    tmp_path, memory=1e4, seconds=0.0, compile_for=topology.parse('cpu:2')
  )
  assert 'compiled' not in data and 'The compiler refused' not in printed
  assert 'it is not proved that there is none' in printed


def test_a_search_without_time_still_reports_a_plan(tmp_path):
  found, printed, data = reported(tmp_path, seconds=0.0)
  assert found.simulated == 1 and found.gap == 1
  assert data['plan']['places'] and data['seconds'] == found.seconds
  assert 'time was up before anything was proved: --plan_seconds' in printed
  assert f'The fastest plan takes {found.seconds:.3g} s a step' not in printed
  takes = f'This plan takes {found.seconds:.3g} s a step'
  assert takes in printed
  # The sentence on evaluations is beside the seconds, and on the page.
  evaluations = 'Time was up before the memory of evaluations was known.'
  assert evaluations in printed.partition(takes)[2].splitlines()[1]
  assert evaluations == data['evaluations']
  shown = ' '.join(Reader((tmp_path / 'plan.html').read_text()).words)
  assert evaluations in shown


@pytest.mark.parametrize('devices, unit', [(2, 1), (8, 2)])
def test_several_nodes_are_shared_out_whole(devices, unit):
  there, recorded = cluster(devices=devices), flow()
  model = roofline.Roofline(
    recorded, count.of_flow(recorded), there, rules.DEFAULT
  )
  space = space_lib.default_space(recorded, model)
  assert (space.devices, space.unit) == (devices, unit)
  assert space.offload == ()  # There is room for all.


def test_what_only_some_stages_read_may_leave_a_crowded_device():
  there, recorded = cluster(memory=1e4), flow()
  model = roofline.Roofline(
    recorded, count.of_flow(recorded), there, rules.DEFAULT
  )
  assert set(space_lib.default_space(recorded, model).offload) == {
    'apply',
    'ref_logp',
  }


def model(host_rows=None, **kwargs):
  known = measured.Measurements(host_rows=host_rows or {})
  return roofline.Roofline(
    flow(),
    count.of_flow(flow()),
    dataclasses.replace(cluster(), **kwargs),
    rules.DEFAULT,
    known,
  )


def test_an_assumption_gives_no_device_to_a_host_stage():
  def is_joined(model):
    long = {'generate', 'gradient', 'ref_logp', 'proximal_logp'}
    groups = space_lib.default_space(flow(), model).colocated
    return any('reward' in group and long & {*group} for group in groups)

  # A tenth of a second a row is worth a place of its own.
  slow = roofline.Assumptions(host_seconds_per_row=0.1)
  one = model()
  one.assumed = slow
  assert is_joined(one)
  assert not is_joined(model({'reward': 0.1}))
  # Shares of a processor are no accelerators.
  one = model(shared_cores=2)
  one.assumed = slow
  assert not is_joined(one)


def test_a_timed_host_stage_is_measured():
  one, node = model({'reward': 0.25}), node_of('reward')
  found = one.explain(flow(), node, plan_lib.Placement())
  assert found.total.tag == 'measured'
  assert found['on the host'].value == 0.25 * flow().rows_of(node)
  assert model().explain(flow(), node, plan_lib.Placement()).total.tag == (
    'assumed'
  )


def node_of(name):
  return next(node for node in flow().nodes if node.name == name)


@pytest.mark.slow
def test_a_choice_that_hangs_on_an_assumption_is_a_guess(monkeypatch, tmp_path):
  monkeypatch.setattr(plan_report.host_timing, 'seconds_per_row', lambda _: {})
  slow = functools.partial(
    roofline.Roofline, assumed=roofline.Assumptions(host_seconds_per_row=0.01)
  )
  monkeypatch.setattr(plan_report.roofline, 'Roofline', slow)
  _, printed, data = reported(tmp_path)
  assert data['known']['assumed'] > 0.1 and 'Timed on' not in printed
  factors = {c['cost']: c['factor'] for c in data['sensitivity']}
  assert factors.pop('reward') == 0.1
  assert set(factors.values()) == {0.9}
  assert data['guesses'] and 'a guess: another plan' in printed
