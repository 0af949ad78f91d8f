"""Steps of text environments: kept, late, lost and continued."""

import collections
import functools
import threading

import pytest

from rlinf_jax.agents import base as agents_base
from rlinf_jax.agents import deadline, stepping
from rlinf_jax.planning import answer_times
import tools_of_mine


def turn_of(texts, question='7', row=1):
  problem = f'{{"question": "{question}"}}'
  return stepping.Turn(bytes([row]), problem, (tuple(texts),))


def test_an_episode_continues_in_another_process():
  """A new environment that was told the past answers as the first one does."""
  make = tools_of_mine.Echo
  steps = functools.partial(stepping.Steps, make)
  pool = deadline.Pool(2, 5.0)
  first, other = steps(pool), steps(pool)
  first([turn_of(['a'])], 1)
  (expected,) = first([turn_of(['a', 'b'])], 1)
  assert expected.step.messages[0]['content'] == '72b'
  assert other([turn_of(['a', 'b'])], 1) == [expected]
  # Neither is an episode taken for another with the same id.
  (wrong,) = first([turn_of(['a', 'b', 'c'], question='8')], 1)
  assert wrong.step.messages[0]['content'] == '83c'
  (begun,) = first([turn_of(['a'], question='8')], 1)
  assert begun.step.messages[0]['content'] == '81a'


def test_an_episode_of_roles_continues_in_another_process():
  make = tools_of_mine.TwoEchoes
  pool = deadline.Pool(2, 5.0)
  first, other = stepping.Steps(make, pool), stepping.Steps(make, pool)

  def turn(*texts):
    return stepping.Turn(b'1', '{"question": "7"}', texts)

  said = [turn(('a',), ()), turn(('a',), ('b',)), turn(('a', 'c'), ('b',))]
  expected = [first([x], 1)[0] for x in said]
  assert [x.reader for x in expected] == [1, 0, 1]
  contents = [x.step.messages[0]['content'] for x in expected]
  assert contents == ['7a', '7b', '7c']
  # The first has a prompt before it, the last is no first turn.
  assert [x.before is None for x in expected] == [False, True, True]
  assert other([said[2]], 1) == [expected[2]]
  # An answer that was lost is asked for again.
  assert first([said[2]], 1) == [expected[2]]


class Slow:
  """Answers turns that are a name when the event of that name is set."""

  events = collections.defaultdict(threading.Event)
  steps = collections.Counter()

  def reset(self, problem):
    return []

  def step(self, text):
    self.steps[text] += 1
    assert self.events[text].wait(30)
    return agents_base.TimeStep(reward=1.0, terminated=True)


def test_slow_steps_go_on_while_others_are_answered():
  steps = stepping.Steps(Slow, deadline.Pool(4, 20.0))
  names = ['a', 'b', 'c', 'd']
  turns = [turn_of([name], row=i) for i, name in enumerate(names)]
  assert steps(turns, 0) == [None] * 4
  Slow.events['b'].set()
  got = steps(turns, 1)
  assert [x is not None for x in got] == [False, True, False, False]
  # The turns without an answer are sent again, together with a new one.
  turns = [turns[3], turns[0], turns[2], turn_of(['e'], row=4)]
  for name in 'ad':
    Slow.events[name].set()
  got = steps(turns, 2)
  assert [x is not None for x in got] == [True, True, False, False]
  for name in 'ce':
    Slow.events[name].set()
  assert all(x.step.reward == 1.0 for x in steps(turns[2:], 2))
  assert Slow.steps == dict.fromkeys('abcde', 1) and not steps._calls


def test_episodes_that_limits_end_are_dropped():
  steps = stepping.Steps(tools_of_mine.Echo, deadline.Pool(2, 5.0))
  turns = [turn_of(['a'], row=i) for i in range(3)]
  steps(turns, 3)
  steps.drop([turns[0].id, turns[2].id, b'unknown'])
  assert {*steps._live} == {turns[1].id}


def test_late_answers_of_dropped_episodes_are_not_kept():
  steps = stepping.Steps(Slow, deadline.Pool(2, 20.0))
  turns = [turn_of([name], row=i) for i, name in enumerate(['late', 'on'])]
  assert steps(turns, 0) == [None, None]
  steps.drop([turns[0].id])
  assert [*steps._calls] == turns[1:]
  Slow.events['late'].set()
  Slow.events['on'].set()
  assert steps(turns[1:], 1)[0].step.reward == 1.0 and not steps._calls


@pytest.mark.parametrize('message', [
  {'role': 'user', 'content': None}, {'content': 'x'}, 'x',
  {'role': 'user', 'content': [{'type': 'image'}]},
  {'role': 'user', 'content': ['x']},
])  # fmt: skip
def test_a_message_without_a_text_fails_its_own_episode(message, capsys):
  class Silent(tools_of_mine.Echo):
    def step(self, text):
      step = super().step(text)
      return step._replace(messages=[message]) if text == 'a' else step

  steps = stepping.Steps(Silent, deadline.Pool(2, 5.0))
  failed, good = steps([turn_of(['a']), turn_of(['b'], row=1)], 2)
  assert isinstance(failed, ValueError) and good.step.messages
  assert 'Silent.step returned the message' in capsys.readouterr().out
  with pytest.raises(ValueError, match='Silent.reset returned the message'):
    agents_base.check_messages(Silent(), 'reset', [message])
  calling = {'role': 'assistant', 'content': None, 'tool_calls': [{}]}
  agents_base.check_messages(Silent(), 'reset', [calling])


def test_a_step_that_ends_late_leaves_no_episode():
  begun, goes_on = [], threading.Event()

  class Late(tools_of_mine.Echo):
    def step(self, text):
      begun.append(threading.current_thread())
      goes_on.wait(60)
      return super().step(text)

  steps = stepping.Steps(Late, deadline.Pool(1, 1.0))
  (got,) = steps([turn_of(['a'])], 1)
  assert begun and isinstance(got, deadline.LateError)
  goes_on.set()
  begun[0].join(60)
  assert not begun[0].is_alive()
  assert not steps._live and not steps._calls


def test_seconds_of_steps_are_recorded(tmp_path):
  steps = stepping.Steps(
    tools_of_mine.Echo, deadline.Pool(2, 2.0), tmp_path / 'seconds.txt'
  )
  steps([turn_of(['a']), turn_of(['hang'], row=2), turn_of(['b'], row=3)], 3)
  quick, _, slow = sorted(answer_times.read(tmp_path / 'seconds.txt'))
  # A step that is late counts until then; it would take a minute.
  assert quick < 2.0 <= slow < 50.0
