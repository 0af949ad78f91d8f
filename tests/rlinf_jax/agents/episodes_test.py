"""Conversations of scripted policies with environments of text."""

import collections
import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlinf_jax.agents import base as agents_base
from rlinf_jax.agents import deadline, episodes, problems, stepping
from rlinf_jax.planning import answer_times
from rlinf_jax.prepare import products
from stages import base
from stages.language import conversation, tokens
from stages.language.scoring import packing
import tools_of_mine

LENGTH = 40


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('tokenizer')
  tokens.train_tokenizer(path, products.corpus(50), 128)
  return str(path)


def draw(rng, rows, held_out):
  del held_out
  return [{'question': str(n)} for n in rng.integers(10, 99, rows)]


def letters(tokenizer, text):
  """A text as one token a letter, as the tokenizer would not write it."""
  return [x for letter in text for x in tokenizer(letter)['input_ids']]


def scripted(tokenizer, texts):
  """A policy whose row `i` says `texts[i]`, one turn after the other."""
  turns = [[letters(tokenizer, t) + [tokenizer.eos_token_id] for t in row]
           for row in texts]  # fmt: skip

  def resume(params, prompt, key_B, now, *, cache, **_):
    out = jax.tree.map(np.array, now)
    for i in np.flatnonzero(out.alive):
      length = int(out.mask[i].sum())
      turn = turns[i][params[i]]
      params[i] += 1
      out.action[i, length : length + len(turn)] = turn
      out.logp[i, length : length + len(turn)] = -1.0
      out.mask[i, length : length + len(turn)] = 1
      out.alive[i] = False
    return base.Completions(*map(jnp.asarray, out)), cache

  def act(params, prompt, key_B):
    B = key_B.shape[0]
    zero_BT = jnp.zeros((B, LENGTH))
    return base.Experience(
      prompt, zero_BT.astype(jnp.int32), zero_BT, zero_BT, zero_BT[:, 0]
    )

  return base.Policy(
    lambda key: None,
    act,
    evaluate=None,  # It learns nothing.
    resume=resume,
    empty_cache=lambda rows: (),
  )


def play(monkeypatch, folder, texts, make=tools_of_mine.Echo, **settings):
  """Plays scripted conversations; returns problems and experience."""
  tokenizer = tokens.load_tokenizer(folder)
  envs = episodes.envs(
    folder, make, max_answer_tokens=12, chat=False, **settings
  )
  source = problems.problems(
    folder,
    make,
    draw=draw,
    batch_size=len(texts) // max(1, len(envs.roles)),
    prompt_length=4,
    held_out=2,
    held_out_batch=2,
    chat=False,
  )
  _, problem = source.next(source.init(0), {})
  # A script is Python, so its stage runs as it is.
  monkeypatch.setattr(jax, 'jit', lambda f, **_: f)
  run = conversation.converse(
    scripted(tokenizer, texts), 'say', envs=envs, max_turns=4
  )
  version = base.Version([0] * len(texts), jnp.int32(0))
  key_B = jax.random.split(jax.random.key(0), len(texts))
  return jax.device_get(run(version, problem, key_B))


def test_trained_ids_are_sampled_ids_and_the_environment_hears_the_text(
  folder, monkeypatch
):
  tokenizer = tokens.load_tokenizer(folder)
  texts = [['calculator', 'expression', 'stop'], ['stop'], ['error', 'stop']]
  problem, x = play(monkeypatch, folder, texts)
  questions = tokens.decode(tokenizer, *x.obs)
  for i, row in enumerate(texts):
    own = x.action[i][x.mask[i] > 0].tolist()
    spoken = [
      letters(tokenizer, text) + [tokenizer.eos_token_id] for text in row
    ]
    assert own == sum(spoken, [])
    # Tokenized again, it would be other tokens.
    if len(row) > 1:
      assert tokenizer(row[0])['input_ids'] != letters(tokenizer, row[0])
    answers = [
      f'\n{questions[i]}{n + 1}{text}\n' for n, text in enumerate(row[:-1])
    ]
    heard = sum((tokenizer(a)['input_ids'] for a in answers), [])
    end = int(packing.lengths(x.mask)[i])
    read = x.action[i][:end][x.mask[i][:end] == 0].tolist()
    assert read == heard
  assert problem.answer.reward.tolist() == [3 + 0.5, 1, 2 + 0.25]
  assert problem.answer.terms['heard'].tolist() == [20, 0, 5]
  assert x.truncated.tolist() == [0, 0, 0]


def test_an_environment_that_hangs_or_raises_loses_its_own_episode(
  folder, monkeypatch
):
  texts = [['a', 'stop'], ['raise'], ['a', 'hang'], ['b', 'stop'], ['hang']]
  start = time.perf_counter()
  problem, x = play(monkeypatch, folder, texts, step_timeout=2.0, num_threads=2)
  assert time.perf_counter() - start < 30  # A hanging one takes 60.
  assert x.env_failed.tolist() == [0, 1, 1, 0, 1]
  assert problem.answer.reward.tolist() == [2.25, 0, 0, 2.25, 0]
  assert (x.mask.sum(1) > 0).tolist() == [True, False, False, True, False]


def test_a_reward_that_is_not_finite_loses_its_own_episode(folder, monkeypatch):
  """Nor may it be beyond float32, as 10³⁰⁰ is, which arrays hold as ∞."""
  texts = [['a', 'stop'], ['a', 'inf'], ['-inf'], ['nan'], ['1e300'], ['stop']]
  problem, x = play(monkeypatch, folder, texts)
  assert x.env_failed.tolist() == [0, 1, 1, 1, 1, 0]
  assert problem.answer.reward.tolist() == [2.25, 0, 0, 0, 0, 1]


def test_a_long_answer_and_the_last_turn_truncate(folder, monkeypatch):
  texts = [['qwjkvzxqwjk'] * 4, ['a'] * 4, ['a', 'stop']]
  problem, x = play(monkeypatch, folder, texts)
  assert x.truncated.tolist() == [1, 1, 0]
  assert problem.answer.terms['turns'].tolist() == [1, 4, 2]


def test_episodes_that_the_last_round_cuts_are_not_kept(folder, monkeypatch):
  made, init = [], stepping.Steps.__init__

  def noted(self, *args):
    made.append(self)
    init(self, *args)

  monkeypatch.setattr(stepping.Steps, '__init__', noted)
  _, x = play(monkeypatch, folder, [['a'] * 4, ['a', 'stop']])
  assert x.truncated.tolist() == [1, 0]
  (steps,) = made
  assert not steps._live and not steps._calls


class Halves:
  """Repeats halves of characters, as tools may do that read a model's JSON."""

  terms = ('heard',)

  def reset(self, problem):
    del problem
    return [{'role': 'user', 'content': '7'}]

  def step(self, text):
    messages = [{'role': 'user', 'content': f'{text}\ud800'}]
    heard = 'much' if text == 'b' else 1
    return agents_base.TimeStep(
      messages, state='\ud800', terms={'heard': heard}
    )


def test_odd_answers_of_an_environment_end_no_run(folder, monkeypatch):
  """A term that is not a number fails its own episode."""
  problem, x = play(monkeypatch, folder, [['a'] * 4, ['b'] * 4], make=Halves)
  assert x.env_failed.tolist() == [0, 1]
  assert problem.answer.terms['heard'].tolist() == [4, 0]


def test_two_roles_hear_each_other_through_the_environment(folder, monkeypatch):
  """Rows of a problem are adjacent: that of the asker, and of the answerer."""
  tokenizer = tokens.load_tokenizer(folder)
  texts = [['a', 'stop'], ['b'], ['raise'], [], ['stop'], []]
  texts += [['a'] * 4, ['b'] * 4, ['a', 'hang'], ['b'], ['qwjkvzxqwjk'], []]
  problem, x = play(
    monkeypatch, folder, texts, tools_of_mine.TwoEchoes, step_timeout=2.0
  )
  read = tokens.decode(tokenizer, x.action, tokens.through_last(x.mask))
  asked = tokens.decode(tokenizer, *x.obs)
  assert read[0] == f'a\n{asked[0]}b\nstop' and read[1] == f'\n{asked[0]}a\nb'
  assert asked[1] == 'no' and [asked[0]] * 2 != asked[2:4]
  terms = problem.answer.terms
  failed = [0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0]
  assert x.env_failed.tolist() == failed
  # Turns of both; the last of a role ends the episode of both.
  turns = [3, 3, 1, 1, 1, 1, 8, 8, 3, 3, 1, 1]
  assert terms['turns'].tolist() == turns
  assert x.truncated.tolist() == [0] * 6 + [1, 1, 0, 0, 1, 1]
  # A turn rewards the answerer with 1 for each turn of the asker.
  assert terms['asker'].tolist() == [2.0, 2.0] + [0] * 10
  assert problem.answer.reward[:2].tolist() == [2.0, 1.0]
  assert not x.mask[[2, 3, 5, 8, 9, 11]].any() and x.mask[4].any()


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
])  # fmt: skip
def test_a_message_without_a_text_fails_its_own_episode(message, capsys):
  class Silent(tools_of_mine.Echo):
    def step(self, text):
      step = super().step(text)
      return step._replace(messages=[message]) if text == 'a' else step

  steps = stepping.Steps(Silent, deadline.Pool(2, 5.0))
  failed, good = steps([turn_of(['a']), turn_of(['b'], row=1)], 2)
  assert isinstance(failed, ValueError) and good.step.messages
  assert 'Silent.step returned the message' in capsys.readouterr().err
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


@pytest.mark.parametrize(
  'waiting, ready, slots, count',
  [
    (8, 0, None, 8),  # All of them.
    (64, 0, 16, 16),  # Slots are full.
    (60, 4, 16, 12),  # Four of them are.
    (40, 24, 16, 0),
    (16, 0, 16, 4),  # A quarter of the unfinished rows.
    (5, 0, 16, 2),
    (1, 0, 16, 1),
    (1, 1, 16, 0),
    (0, 3, 16, 0),
  ],
)
def test_the_policy_goes_on_when_enough_rows_can(waiting, ready, slots, count):
  assert episodes._awaited(slots, waiting, ready) == count


def test_seconds_of_steps_are_recorded(tmp_path):
  steps = stepping.Steps(
    tools_of_mine.Echo, deadline.Pool(2, 2.0), tmp_path / 'seconds.txt'
  )
  steps([turn_of(['a']), turn_of(['hang'], row=2), turn_of(['b'], row=3)], 3)
  quick, _, slow = sorted(answer_times.read(tmp_path / 'seconds.txt'))
  # A step that is late counts until then; it would take a minute.
  assert quick < 2.0 <= slow < 50.0


def test_many_hanging_calls_do_not_stop_the_others():
  pool, released = deadline.Pool(4, 1.0), threading.Event()

  def call(i):
    if i % 10 == 0:
      released.wait(60)
    if i % 10 == 1:
      raise RuntimeError('as told')
    return i

  results = pool.map(call, range(100))
  released.set()
  for i, result in enumerate(results):
    expected = {0: deadline.LateError, 1: RuntimeError}.get(i % 10)
    assert isinstance(result, expected) if expected else result == i


def test_episodes_to_imitate_mask_what_the_environment_says(folder):
  tokenizer = tokens.load_tokenizer(folder)
  source = problems.examples(
    folder,
    tools_of_mine.Echo,
    draw=draw,
    script=lambda rng, problem: ['calculator', 'stop'],
    batch_size=2,
    prompt_length=4,
    response_length=LENGTH,
    held_out=2,
    held_out_batch=2,
    chat=False,
  )
  _, batch = source.next(source.init(0), {})
  question = tokens.decode(tokenizer, batch.prompt.token, batch.prompt.mask)[0]
  end = tokenizer.eos_token_id
  own = [*tokenizer('calculator')['input_ids'], end]
  said = tokenizer(f'\n{question}1calculator\n')['input_ids']
  last = [*tokenizer('stop')['input_ids'], end]
  row = own + said + last
  assert batch.action[0, : len(row)].tolist() == row
  mask = [1] * len(own) + [0] * len(said) + [1] * len(last)
  assert batch.mask[0].tolist() == mask + [0] * (LENGTH - len(row))
