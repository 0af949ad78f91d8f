"""Conversations of scripted policies with environments of text."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlinf_jax.agents import base as agents_base
from rlinf_jax.agents import deadline, episodes, problems, stepping
from rlinf_jax.prepare.agents import products
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


def scripted(tokenizer, texts, ends=True):
  """A policy whose row `i` says `texts[i]`, one turn after the other."""
  end = [tokenizer.eos_token_id] * ends
  turns = [[letters(tokenizer, t) + end for t in row] for row in texts]

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


def play(
  monkeypatch,
  folder,
  texts,
  make=tools_of_mine.Echo,
  *,
  chat=False,
  ends=True,
  **settings,
):
  """Plays scripted conversations; returns problems and experience."""
  tokenizer = tokens.load_tokenizer(folder)
  envs = episodes.envs(
    folder, make, max_answer_tokens=12, chat=chat, **settings
  )
  source = problems.problems(
    folder,
    make,
    draw=draw,
    batch_size=len(texts) // max(1, len(envs.roles)),
    prompt_length=4,
    held_out=2,
    held_out_batch=2,
    chat=chat,
  )
  _, problem = source.next(source.init(0), {})
  # A script is Python, so its stage runs as it is.
  monkeypatch.setattr(jax, 'jit', lambda f, **_: f)
  run = conversation.converse(
    scripted(tokenizer, texts, ends), 'say', envs=envs, max_turns=4
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


TEMPLATE = '{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}'


@pytest.mark.parametrize('ends', [True, False])
def test_a_turn_that_a_text_ends_gets_the_end_token_of_the_template(
  ends, tmp_path, monkeypatch
):
  tokenizer = tokens.train_tokenizer(tmp_path, products.corpus(50), 128)
  tokenizer.chat_template = TEMPLATE
  tokenizer.save_pretrained(tmp_path)
  texts = [['expression', 'stop']]
  _, x = play(monkeypatch, str(tmp_path), texts, chat=True, ends=ends)
  said = tokenizer.decode(x.action[0][: int(packing.lengths(x.mask)[0])])
  (question,) = tokens.decode(tokenizer, *x.obs)
  assert said == (
    f'expression<|endoftext|>{question}1expression<|endoftext|>stop'
    + '<|endoftext|>' * ends
  )
  assert x.mask.sum() == len('expression') + len('stop') + 2 * ends


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
