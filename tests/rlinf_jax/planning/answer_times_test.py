"""Plans of conversations whose environments take measured seconds."""

import functools
import html
import json

import pytest

from planner.ir import plan as plan_lib
from rlinf_jax.planning import answer_times, plan_report
from rlinf_jax.report import plan_page
from stages import workflows
from stages.language import conversation, evaluate, policy_stages
from stages.learn import optimizers
from tests.rlinf_jax.planning import plan_report_test
import tiny
import toy_conversation


@pytest.fixture(scope='module')
def reported(tmp_path_factory):
  """Plans and what is said of them, by the seconds of answers."""
  folder = tmp_path_factory.mktemp('reported')
  return {seconds: report(folder, seconds) for seconds in ((), (0.0, 2.0))}


def report(folder, seconds):
  converse = toy_conversation.converse(3)
  grpo = workflows.grpo(
    tiny.policy(length=10),
    conversation.episode_return(),
    optimizers.adamw(1e-2),
    group_size=4,
    rollouts=functools.partial(policy_stages.complete, converse=converse),
    evaluator=functools.partial(evaluate.evaluate, converse=converse),
  )
  problem, printed = tiny.problem(), []
  flows = tiny.trace(grpo, problem), tiny.trace_evaluation(grpo, problem)
  found = plan_report.report_plan(
    flows,
    staleness=0,
    own=plan_lib.parse({}, flows[0].stages),
    cluster=plan_report_test.cluster(devices=1, node=1),
    answer_seconds=seconds,
    seconds=30.0,
    output=folder / 'plan.json',
    print_text=printed.append,
  )
  data = json.loads((folder / 'plan.json').read_text())
  return found, '\n'.join(printed), data


@pytest.mark.slow
def test_a_plan_shows_how_long_tools_are_waited_for(reported):
  without, text, _ = reported[()]
  assert 'How long environment waits for tools is not known' in text
  found, text, data = reported[0.0, 2.0]
  assert 'Answers took 1 s on average and 2 s at most, of 2 measured.' in text
  assert 'environment on 32 rows waits 2 s, until 32 answers have come' in text
  # Three turns, one after the other.
  waits = found.seconds - without.seconds
  assert 4.0 < waits < 6.01, waits
  assert data['answers'] in text
  spent = float(data['answers'].split()[1])
  assert data['answers'].startswith('environment: ') and spent >= 6.0
  assert data['waiting'] == {'environment': pytest.approx(spent, rel=1e-2)}


@pytest.mark.slow
def test_the_page_of_a_plan_names_the_waiting_for_tools(reported):
  _, _, without = reported[()]
  _, text, data = reported[0.0, 2.0]
  pages = [html.unescape(plan_page.text(x)) for x in (without, data)]
  waits = 'all of it waiting for answers of tools, and no work'
  assert [page.count(waits) for page in pages] == [0, 1]
  (row,) = (part for part in pages[1].split('<tr>') if waits in part)
  assert 'environment' in row and 'generate' not in row
  assert data['answers'] in pages[1] and 'Answers took 1 s' in pages[1]
  assert 'How long environment waits for tools is not known' in pages[0]


@pytest.mark.parametrize('text', ['', 'one', '1.0 -2.0', 'nan', 'inf'])
def test_files_with_anything_else_are_refused(tmp_path, text):
  (tmp_path / 'seconds.txt').write_text(text)
  with pytest.raises(ValueError, match='should hold the seconds of answers'):
    answer_times.read(tmp_path / 'seconds.txt')


def test_answers_that_nothing_waits_for_are_refused():
  with pytest.raises(ValueError, match='no stage of the recipe waits'):
    answer_times.describe(plan_report_test.flow(), (1.0,))
