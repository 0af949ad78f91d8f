"""Environments of the library `verifiers`, against the library itself."""

import asyncio
import concurrent.futures
import functools
import json
import signal
import threading
import time
import types

import jax
import numpy as np
import pytest

pytest.importorskip('verifiers', reason='pip install "rlinf-jax[verifiers]".')

import datasets
from openai.types import chat
import verifiers

from rlinf_jax.agents import episodes, formats, problems, verifiers_env
from rlinf_jax.data import text_arrays
from rlinf_jax.prepare import warm_start
from rlinf_jax.prepare.agents import products
import stages
from stages import workflows
from stages.language import conversation, huggingface, policy_stages, tokens
from stages.learn import optimizers
import verifiers_envs

SCRIPTS = {
  'single': [['hello'], ['aeiou'], [' ']],
  'hints': [['a', 'bye'], ['a', 'be', 'c', 'd', 'e'], ['x', 'end'], ['a', '']],
  'with_tools': [
    ['[add(a=20, b=22)]', '42'],
    ['[add(a=1, b=1), add(a=2, b=2)]', '[add(a=1, b="x")]', '[add(a=1)]', '7'],
    ['[subtract(a=1)]', '[add(a=', 'never said'],
  ],
}


@pytest.fixture(scope='module')
def made():
  """An adapter of each environment."""
  return {
    name: verifiers_env.VerifiersEnv(
      getattr(verifiers_envs, name), parse=formats.pythonic
    )
    for name in SCRIPTS
  }


def row(env, i=1):
  return env.get_dataset()[i]


async def played(env, problem, texts):
  """The library's result for texts: messages that were read, and a state."""
  said = iter(texts)
  read = []

  async def create(*, messages, **settings):
    read.append(messages)
    text = next(said)
    message = {'role': 'assistant', 'content': text}
    if text.startswith('[') and text.endswith(']'):
      message['content'] = None
      message['tool_calls'] = [
        {
          'id': str(i),
          'type': 'function',
          'function': {
            'name': call.name,
            'arguments': json.dumps(call.arguments),
          },
        }
        for i, call in enumerate(formats.pythonic(text))
      ]
    choice = {'index': 0, 'finish_reason': 'stop', 'message': message}
    return chat.ChatCompletion.model_validate({
      'id': 'x', 'object': 'chat.completion', 'created': 0, 'model': 'x',
      'choices': [choice],
    })  # fmt: skip

  completions = types.SimpleNamespace(create=create)
  client = types.SimpleNamespace(
    chat=types.SimpleNamespace(completions=completions)
  )
  state = await env.rollout(problem, client, 'x', {})
  await env.rubric.score_rollout(state)
  return read, state


def plain(messages):
  """Roles and texts."""
  return [
    (
      x['role'],
      x['content']
      if isinstance(x['content'], str)
      else ''.join(part['text'] for part in x['content']),
    )
    for x in messages
  ]


@pytest.mark.parametrize(
  'name, texts',
  [(name, texts) for name in SCRIPTS for texts in SCRIPTS[name]],
)
def test_episodes_are_those_of_the_library(made, name, texts):
  """Messages, rewards, the rubric's values, and where episodes end."""
  library = getattr(verifiers_envs, name)()
  problem = row(library)
  read, state = asyncio.run(played(library, problem, texts))
  env = made[name]
  heard = [plain(env.reset(problem))]
  for text in texts:
    step = env.step(text)
    if step.terminated:
      break
    heard.append(plain(step.messages))
    assert step.reward == 0.0
  assert len(heard) == len(read)
  assert heard[0] == plain(read[0])
  for now, before, new in zip(read[1:], read, heard[1:], strict=False):
    assert plain(now[len(before) + 1 :]) == new
  assert step.reward == pytest.approx(state['reward'])
  assert step.terms == state['metrics'] and {*step.terms} == {*env.terms}
  assert not step.truncated


def test_a_tool_environment_tells_the_model_of_its_tools(made):
  env = made['with_tools']
  env.reset(row(verifiers_envs.with_tools()))
  assert [x['function']['name'] for x in env.tools] == ['add']
  assert env.step('[add(a=20, b=22)]').messages[0]['content'] == '42'


@pytest.mark.parametrize(
  'text, error, message',
  [
    ('fail', verifiers.InfraError, 'as told'),
    ('rewrite', ValueError, 'rewrote its conversation'),
    ('picture', ValueError, r"parts of the types \['image_url'\]"),
  ],
)
def test_what_cannot_go_on_raises_and_others_do(made, text, error, message):
  other = verifiers_env.VerifiersEnv(verifiers_envs.hints)
  problem = row(verifiers_envs.hints())
  other.reset(problem)
  env = verifiers_env.VerifiersEnv(verifiers_envs.hints)
  env.reset(problem)
  with pytest.raises(error, match=message):
    env.step(text)
  assert other.step('a').messages[0]['content'] == '1: a'


def test_episodes_that_wait_do_not_hold_up_others_and_clean_up_when_dropped():
  load = functools.partial(verifiers_envs.hints)
  slow, quick = (verifiers_env.VerifiersEnv(load) for _ in range(2))
  problem = row(verifiers_envs.hints())
  slow.reset(problem)
  waits = concurrent.futures.ThreadPoolExecutor(1).submit(slow.step, 'wait')
  quick.reset(problem)
  assert quick.step('bye').terminated
  shared = verifiers_env._shared(load).env
  assert shared.cleaned == 1
  quick.reset(problem)
  quick.reset(problem)  # Drops the one before.
  slow._end()
  del quick
  limit = time.monotonic() + 60
  while shared.cleaned < 1 + 3 and time.monotonic() < limit:
    time.sleep(0.01)
  assert shared.cleaned == 4
  with pytest.raises(RuntimeError, match='was dropped'):
    waits.result(60)


def test_environments_load_in_any_thread_and_take_no_signals():
  before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
  made = []
  load = functools.partial(verifiers_envs.single)
  thread = threading.Thread(
    target=lambda: made.append(verifiers_env.VerifiersEnv(load))
  )
  thread.start()
  thread.join()
  assert made
  verifiers_env.VerifiersEnv(functools.partial(verifiers_envs.single))
  assert before == {n: signal.getsignal(n) for n in before}


def test_held_out_rows_are_those_for_evaluation_or_every_eighth():
  rng = np.random.default_rng(0)
  drawn = lambda load, held_out, rows: {
    x['example_id']
    for x in verifiers_env.draw(rng, rows, held_out, load)
  }  # fmt: skip
  assert drawn(verifiers_envs.single, True, 5) == {*range(5)}
  assert drawn(verifiers_envs.single, False, 20) == {*range(20)}
  assert drawn(verifiers_envs.hints, True, 3) == {0, 8, 16}
  assert drawn(verifiers_envs.hints, False, 17) == {*range(20)} - {0, 8, 16}
  with pytest.raises(ValueError, match='7 problems are held out.* has 3 rows'):
    drawn(verifiers_envs.hints, True, 7)


def test_equal_prompts_are_all_held_out_or_none_is():
  words = [*'abcdefghij', *'abcdefghij']
  rows = [{'question': x, 'answer': x} for x in words]
  load = functools.cache(
    lambda: verifiers.SingleTurnEnv(
      dataset=datasets.Dataset.from_list(rows),
      rubric=verifiers.Rubric(funcs=[lambda answer: 1.0]),
    )
  )
  rng = np.random.default_rng(0)
  held_out, others = (
    {x['question'] for x in verifiers_env.draw(rng, n, is_held_out, load)}
    for n, is_held_out in ((4, True), (16, False))
  )
  assert held_out == {'a', 'i'} and others == {*'bcdefghj'}


def group_reward(completions) -> list[float]:
  return [0.0 for _ in completions]


@pytest.mark.parametrize(
  'settings, message',
  [
    (
      {'rubric': verifiers.Rubric(funcs=[group_reward])},
      r'rewards whole groups \(group_reward\)',
    ),
    ({'message_type': 'completion'}, 'has no messages'),
  ],
)
def test_environments_that_are_no_single_conversations_are_refused(
  settings, message
):
  load = lambda: verifiers.SingleTurnEnv(
    dataset=verifiers_envs.dataset(2), **settings
  )
  with pytest.raises(ValueError, match=message):
    verifiers_env.VerifiersEnv(load)


def test_a_dataset_too_small_to_hold_rows_out_is_refused():
  load = lambda: verifiers.SingleTurnEnv(
    dataset=verifiers_envs.dataset(1), rubric=verifiers_envs.rubric()
  )
  with pytest.raises(ValueError, match='has 1 rows, too few'):
    verifiers_env.draw(np.random.default_rng(0), 1, False, load)


@pytest.mark.slow
def test_grpo_trains_a_step_on_the_rewards_of_the_rubric(tmp_path):
  """The rewards are those of the library for the texts that were sampled."""
  load = functools.partial(verifiers_envs.hints, max_turns=2)
  make = functools.partial(verifiers_env.VerifiersEnv, load)
  model = warm_start.checkpoint(
    str(tmp_path), corpus=products.corpus, vocabulary=80, width=16, layers=1,
    heads=2, kv_heads=1, feed_forward=16,
  )  # fmt: skip
  envs = episodes.envs(model, make, max_answer_tokens=256, chat=False)
  converse = functools.partial(conversation.converse, envs=envs, max_turns=2)
  policy = huggingface.policy(model, response_length=512)
  kept = []

  def verify(episode, action, mask):
    kept.append((episode, np.asarray(action), np.asarray(mask)))
    return conversation.episode_return().run(episode, action, mask)

  grpo = workflows.grpo(
    policy,
    stages.Stage(verify, 'reward', host=True, out_shapes=verdict_shapes),
    optimizers.adamw(1e-2),
    group_size=4,
    rollouts=functools.partial(policy_stages.complete, converse=converse),
  )
  source = problems.problems(
    model, make, draw=functools.partial(verifiers_env.draw, load=load),
    batch_size=4, prompt_length=32, held_out=4, held_out_batch=4, chat=False,
  )  # fmt: skip
  _, problem = source.next(source.init(0), {})
  state = grpo.init(jax.random.key(0))
  after, _ = grpo.step(state, problem, jax.random.key(2))
  changed = jax.tree.map(
    lambda a, b: bool((a != b).any()), after.actor.params, state.actor.params
  )
  assert any(jax.tree.leaves(changed))
  ((episode, action_BT, mask_BT),) = kept
  tokenizer, library = tokens.load_tokenizer(model), load()
  now = types.SimpleNamespace(
    own=mask_BT, completions=types.SimpleNamespace(action=action_BT)
  )
  rows = text_arrays.unpack(np.asarray(episode.answer))
  for i, row in enumerate(rows):
    texts = episodes._texts(tokenizer, now, i)
    want = 0.0
    if not episode.truncated[i]:
      _, state = asyncio.run(played(library, json.loads(row), texts))
      want = state['reward']
    assert episode.reward[i] == pytest.approx(want, rel=1e-5)
  assert np.unique(episode.reward).size > 4


def verdict_shapes(episode, action, mask):
  return jax.eval_shape(
    conversation.episode_return().run, episode, action, mask
  )
