import itertools
import math
import pathlib
import re
import time
from typing import NamedTuple

import pytest

import claims
import rewards_of_mine
from rlinf_jax.isolation import pool as calls
from rlinf_jax.rewards import answers, base, pool
from rlinf_jax.system import notices


def completions(*texts, answer='1'):
  return [base.Completion(text, '', answer, 1, 8) for text in texts]


@pytest.fixture(scope='module')
def misbehave():
  return pool.isolated(rewards_of_mine.misbehave, seconds=0.5, processes=2)


FAILURES = 'raise sleep swallow hold fill crash exit text far header'.split()


def test_a_failure_costs_its_own_reward_only(misbehave):
  texts = [text for failure in FAILURES for text in (failure, 'fine')]
  scores = misbehave.score(completions(*texts))
  assert scores[1::2] == [0.5] * len(FAILURES)
  assert all(map(math.isnan, scores[::2])), scores


def test_the_signal_that_ends_a_job_costs_no_reward(misbehave):
  """A run then stops after its step, whose rewards must be all there."""
  assert misbehave.score(completions('terminate', 'fine')) == [0.5, 0.5]


def test_processes_that_a_reward_starts_are_ended_by_terminate():
  made = pool.isolated(rewards_of_mine.misbehave, seconds=15, processes=1)
  assert made.score(completions('program', 'fork')) == [0.5, 0.5]


def test_the_first_failure_is_told_and_others_are_not(capsys):
  made = pool.isolated(rewards_of_mine.misbehave, processes=1)
  made.score(completions('fine', 'raise', 'text'))
  (line,) = capsys.readouterr().out.splitlines()
  assert line.startswith(
    'The reward misbehave failed on a completion, which counts as 0 '
    '(RuntimeError: as told).'
  )


def test_a_failure_is_told_with_the_notices_of_a_process_of_ray(monkeypatch):
  """The standard error of such a process goes into a file of Ray."""
  monkeypatch.setattr(notices, '_buffer', None)
  notices.start_buffering()
  pool.isolated(rewards_of_mine.misbehave, processes=1).score(
    completions('text')
  )
  (line,) = notices.drain()
  assert "could not convert string to float: 'much'" in line


@pytest.mark.parametrize(
  'limits',
  [
    {'processes': 0},
    *({'seconds': x} for x in (0, math.nan, math.inf)),
    *({'memory': x} for x in (-1.0, math.inf)),
  ],
)
def test_limits_that_no_call_can_keep_are_refused(limits):
  with pytest.raises(ValueError, match='shout would run for .* above 0'):
    pool.isolated(rewards_of_mine.shout, **limits)


def test_an_answer_is_never_run_as_a_pickle(misbehave, tmp_path):
  folder = tmp_path / 'made'
  (score,) = misbehave.score(completions('pickle', answer=str(folder)))
  assert math.isnan(score) and not folder.exists()
  assert misbehave.score(completions('fine', 'fine')) == [0.5, 0.5]


def test_a_late_call_ends_soon_after_its_limit(misbehave):
  misbehave.score(completions('fine', 'fine'))
  start = time.perf_counter()
  (score,) = misbehave.score(completions('hold'))
  assert math.isnan(score)
  assert time.perf_counter() - start < 30  # It would take a minute.


def test_a_process_that_reads_nothing_costs_the_next_call_its_limit():
  one = pool.isolated(rewards_of_mine.misbehave, seconds=0.5, processes=1)
  start = time.perf_counter()
  # More than the socket itself can hold.
  deaf, lost, fine = one.score(completions('deaf', 'x' * 2**24, 'fine'))
  assert deaf == 0.25 and math.isnan(lost) and fine == 0.5
  assert time.perf_counter() - start < 30  # It would take a minute.


def test_an_async_function_is_refused():
  async def asks(completion):
    return 1.0

  with pytest.raises(ValueError, match='is an `async` function'):
    pool.isolated(asks)


def test_what_cannot_be_imported_is_refused_at_once():
  for function in (lambda completion: 1.0, print_nothing()):
    with pytest.raises(ValueError, match='put a function into a module'):
      pool.isolated(function)


def print_nothing():
  def inner(completion):
    return 0.0

  return inner


def test_a_module_that_does_not_import_is_named(monkeypatch):
  monkeypatch.setattr(rewards_of_mine.shout, '__module__', 'no_such_module')
  made = pool.isolated(rewards_of_mine.shout, processes=1)
  with pytest.raises(ImportError, match='shout of no_such_module.*No module'):
    made.score(completions('A'))


@pytest.mark.parametrize(
  'name, line, cause',
  [
    ('raises', 'raise KeyError("API_KEY")', "KeyError: 'API_KEY'"),
    ('exits', 'raise SystemExit(3)', 'SystemExit: 3'),
    ('ends', 'import os; os._exit(3)', 'its process ended'),
  ],
)
def test_a_module_that_fails_as_it_is_imported_says_why(
  tmp_path, monkeypatch, name, line, cause
):
  (tmp_path / f'rewards_that_{name}.py').write_text(f'{line}\n')
  monkeypatch.syspath_prepend(tmp_path)
  made = pool.named(f'rewards_that_{name}', 'score', processes=1)
  with pytest.raises(ImportError, match=f'of rewards_that_{name}: {cause}'):
    made.score(completions('A'))


LATE = 5.0  # Seconds that a machine several times slower takes to end a call.
DEEP = 3000
# The number is compared with plain numbers alone. For the other one, texts are
# parsed as mathematics, which takes all of the time of a third of them.
ANSWERS = NUMBER, MATHEMATICS = '271828', 'x+1'
SOME = '', MATHEMATICS, 6  # Every sixth text.
# From a language model in bad faith.
HOSTILE = [
  '10**10**10',
  '$10^{10^{10}}$',
  '\\boxed{10^{10^{10}}}',
  '\\boxed{9^{9^{9^{9}}}}',
  '\\boxed{(10^9)!}',
  '\\boxed{\\sum_{i=1}^{10^{12}} i^2}',
  '\\boxed{\\int_0^\\infty e^{-x^{77}} \\sin(x^{33}) dx}',
  '\\boxed{\\prod_{k=1}^{10^8} (1+1/k)}',
  '{' * 2**20,
  '\\boxed{' * 2**17,
  '}' * 2**20,
  '$' * 2**20,
  '(' * DEEP + '1' + ')' * DEEP,
  '\\boxed{' + '(' * DEEP + '1' + ')' * DEEP + '}',
  '\\boxed{' + '\\frac{1}{' * DEEP + '1' + '}' * DEEP + '}',
  '\\boxed{' + '\\sqrt{' * DEEP + '2' + '}' * DEEP + '}',
  '\\boxed{' + '1+' * DEEP + '1}',
  '\\boxed{' + '-' * DEEP + '1}',
  '\\boxed{' + 'x^' * DEEP + '2}',
  '9' * 2**20,
  '\\boxed{' + '9' * 9000 + '}',
  '\\boxed{0.' + '3' * 9000 + '}',
  '1,' * 2**19,
  '\0' * 2**10,
  '\\boxed{\0}',
  '\ud800',
  '\\boxed{\udfff}',
  '\u202e1\u202c',
  '\\boxed{١٢}',
  '\\boxed{\\infty-\\infty}',
  '\\boxed{1/0}',
  '\\boxed{0^0}',
  '\\boxed{\\text{' + 'a' * 9000 + '}}',
  '\\boxed{__import__("os").system("false")}',
  'the answer is ' * 50_000,
  '#### ' * 50_000,
  '\\begin{pmatrix}' + '1 & ' * 2000 + '\\end{pmatrix}',
  '\\boxed{\\{' + ','.join(map(str, range(2000))) + '\\}}',
  '\\boxed{x \\in (-\\infty, ' + '(' * 100 + '}',
  '\\boxed{\\lim_{x \\to 0} \\frac{\\sin x}{x}}',
]


class Watched(NamedTuple):
  """Measurements of calls.

  Attributes:
    seconds: of each call by its text, without those to start a process.
    resident: bytes that each process held in memory at its most.
  """

  seconds: dict[str, float]
  resident: list[int]


@pytest.fixture
def watched(monkeypatch):
  """Measurements of all calls of a test."""
  found = Watched({}, [])
  call, start, kill = (
    getattr(calls._Process, name) for name in ('call', '_start', 'kill')
  )

  def timed_start(self):
    begin = time.perf_counter()
    start(self)
    self.starting = time.perf_counter() - begin

  def timed(self, args, kwargs):
    self.starting, begin = 0.0, time.perf_counter()
    try:
      return call(self, args, kwargs)
    finally:
      took = time.perf_counter() - begin - self.starting
      found.seconds[args[0].text] = took
      measure(self)

  def measure(self):
    if self._child is not None and self._child.returncode is None:
      status = pathlib.Path(f'/proc/{self._child.pid}/status').read_text()
      # Linux forgets it where the process has ended.
      found.resident.extend(
        int(kib) * 2**10 for kib in re.findall(r'VmHWM:\s+(\d+) kB', status)
      )

  def measured_kill(self):
    measure(self)
    kill(self)

  monkeypatch.setattr(calls._Process, '_start', timed_start)
  monkeypatch.setattr(calls._Process, 'call', timed)
  monkeypatch.setattr(calls._Process, 'kill', measured_kill)
  return found


def test_a_call_that_fills_the_memory_stays_below_its_limit(watched):
  made = pool.isolated(rewards_of_mine.misbehave, memory=0.5, processes=1)
  grow, fine = made.score(completions('grow', 'fine'))
  assert math.isnan(grow) and fine == 0.5
  assert 2**28 < max(watched.resident) < 2**29


@pytest.mark.slow
@pytest.mark.parametrize(
  'tail, answer, every',
  claims.some(
    [*itertools.product(('', '\n', ' .', '}', '$'), ANSWERS, [1]), SOME],
    keep=[('', NUMBER, 1), SOME],
  ),
)
def test_hostile_texts_end_within_their_limits_and_are_wrong(
  tail, answer, every, watched
):
  seconds, memory = 1.0, 1.0
  judge = pool.isolated(
    answers.correct, seconds=seconds, memory=memory, processes=2
  )
  right = completions(*['#### 2'] * 20, answer='2')
  for _ in '12':  # New processes take longer for their first.
    judge.score(right)
  watched.seconds.clear()
  texts = [text + tail for text in HOSTILE[::every]]
  scores = judge.score(completions(*texts, answer=answer))
  assert not any(score > 0 for score in scores)
  assert watched.seconds.keys() == set(texts)
  late = seconds + calls.GRACE + LATE
  assert not {k[:50]: v for k, v in watched.seconds.items() if v > late}
  assert 0 < max(watched.resident) < memory * 2**30
  for _ in '12':
    fine = judge.score(right)
  assert fine == [1.0] * 20


def test_rewards_are_in_the_order_of_completions():
  made = pool.isolated(rewards_of_mine.shout, processes=2)
  assert made.score(completions(*'AbCdEf')) == [1.0, 0.0] * 3


def test_what_a_function_writes_to_stderr_fills_no_disk():
  made = pool.isolated(rewards_of_mine.kept_of_stderr, processes=1)
  assert made.score(completions('a warning\n', 'another\n')) == [0, 0]
