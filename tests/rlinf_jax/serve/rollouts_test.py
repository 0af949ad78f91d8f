"""Rows that agents play are those that the endpoint served."""

import gc
import itertools
import json
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from rlinf_jax.data import text_arrays
from rlinf_jax.serve import rollouts
from rlinf_jax.serve import sessions as sessions_lib
import served_models
from stages import base
from stages.language import huggingface, tokens

LENGTH, GROUP = 64, 3
PROBLEMS = [{'say': 'hello'}, {'say': 'vary'}]
heard = {}  # Log-probabilities by reward.
sessions, varied = itertools.count(1), itertools.count()


def agent(base_url, api_key, problem):
  """Two turns; a reward that names the session."""
  client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
  with client:
    word = problem['say']
    if word == 'vary':  # Its sessions read different prompts.
      word += str(next(varied) % 10)
    messages, logp = [{'role': 'user', 'content': word}], []
    for _ in range(2):
      # The temperature of training overrules that of the agent.
      reply = client.chat.completions.create(
        model='policy', messages=messages, logprobs=True, temperature=0.3
      ).choices[0]
      logp += [x.logprob for x in reply.logprobs.content]
      messages += [reply.message, {'role': 'user', 'content': 'more'}]
  reward = next(sessions) / 1024  # Exact in float32.
  heard[reward] = logp
  return reward


late_may_end = threading.Event()


def fails(base_url, api_key, problem):
  if problem['say'] == 'hello':
    raise RuntimeError('this agent raises')
  if problem['say'] == 'late':
    late_may_end.wait(60)
  if problem['say'] == 'idle':
    return 0.25  # Without a call.
  return agent(base_url, api_key, problem)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return served_models.model(tmp_path_factory.mktemp('served'))


@pytest.fixture(scope='module')
def policy(folder):
  return huggingface.policy(folder, response_length=LENGTH)


@pytest.fixture(scope='module')
def actor(policy):
  return base.Version(policy.init(jax.random.key(0)), jnp.int32(4))


def play(folder, policy, actor, agent, problems=PROBLEMS, **settings):
  problems = [x for x in problems for _ in range(GROUP)]
  prompt = tokens.pad_left([[1, 2, 3]] * len(problems), 32)
  answer = text_arrays.pack([json.dumps(x) for x in problems], 64)
  run = rollouts.converse(
    policy,
    'generate',
    group_size=GROUP,
    agents=rollouts.agents(
      folder,
      agent,
      response_length=LENGTH,
      call_prompt_length=128,
      call_length=8,
      num_threads=6,
      **settings,
    ),
  )
  key_B = jax.random.split(jax.random.key(1), len(problems))
  return run(actor, base.Problem(prompt, answer), key_B)


def test_ids_trained_on_are_ids_served_and_scored_alike(folder, policy, actor):
  heard.clear()
  problem, x = play(folder, policy, actor, agent)
  own_BT = x.mask > 0
  for i, reward in enumerate(problem.answer.reward):
    served = heard[float(reward)]
    np.testing.assert_array_equal(x.logp[i][own_BT[i]], np.float32(served))
    assert problem.answer.terms['turns'][i] == 2
    assert (x.version[i][own_BT[i]] == 4).all()
  # The rest of prompts that differ within a group is in the action.
  tokenizer = tokens.load_tokenizer(folder)
  said = tokens.decode(tokenizer, *x.obs)
  assert said[:GROUP] == ['user:hello;assistant:'] * GROUP
  assert said[GROUP:] == ['user:vary'] * GROUP
  first = own_BT.argmax(1)
  assert (first[:GROUP] == 0).all() and (first[GROUP:] > 0).all()
  scored = policy.evaluate(actor.params, x.obs, x.action, group_size=GROUP)
  np.testing.assert_allclose(
    np.asarray(scored.logp)[own_BT], x.logp[own_BT], atol=2e-5
  )


def test_equal_keys_give_equal_rows(folder, policy, actor):
  rows = [
    play(folder, policy, actor, agent, PROBLEMS[:1])[1].action for _ in range(2)
  ]
  np.testing.assert_array_equal(*rows)


def test_parameters_are_released_with_their_batch(folder, policy, actor):
  def quick(base_url, api_key, problem):
    return agent(base_url, api_key, {'say': 'hello'})

  newer = base.Version(jax.tree.map(jnp.copy, actor.params), jnp.int32(5))
  alive = [weakref.ref(x) for x in jax.tree.leaves(newer.params)]
  play(folder, policy, newer, quick, PROBLEMS[:1])
  del newer
  deadline = time.monotonic() + 60  # The thread of the batch ends by itself.
  while any(x() is not None for x in alive) and time.monotonic() < deadline:
    gc.collect()
    time.sleep(0.05)
  assert not any(x() is not None for x in alive)


def test_an_agent_that_raises_or_is_late_loses_its_own_row(
  folder, policy, actor
):
  problems = [{'say': x} for x in ('hello', 'fine', 'late', 'idle')]
  play(folder, policy, actor, fails, problems[1:2])  # Compiles.
  start = time.perf_counter()
  problem, x = play(folder, policy, actor, fails, problems, timeout=8.0)
  assert time.perf_counter() - start < 50  # A late one takes a minute.
  late_may_end.set()
  failed = x.env_failed.reshape(-1, GROUP)
  assert (
    failed[:, 0].tolist() == [1, 0, 1, 0] and (failed.T == failed.T[0]).all()
  )
  has_tokens = (x.mask.sum(1) > 0).reshape(-1, GROUP)[:, 0]
  assert has_tokens.tolist() == [False, True, False, False]
  assert problem.answer.reward[-1] == 0.25
  assert (x.obs.mask.sum(1) > 0).all()


def test_an_agent_that_fails_leaves_the_prompt_of_the_others():
  """The beginning that it does not share would take room of their rows."""
  good = sessions_lib.Trajectory(
    (1, 2, 3, 4), (7, 8), (1, 1), (-1.0, -2.0), (0, 0)
  )
  odd = good._replace(prompt=(1, 9))
  outcomes = [rollouts.Outcome([good], 1.0), rollouts.Outcome([odd], None)]
  prompt = tokens.pad_left([[5]] * 2, 6)
  problem = base.Problem(prompt, np.zeros((2, 4), np.uint8))
  x, _ = rollouts._rows(3, 2, problem, outcomes)
  assert x.obs.token[0].tolist() == [0, 0, 1, 2, 3, 4]
  assert x.action[0].tolist() == [7, 8, 0] and x.mask[0].tolist() == [1, 1, 0]
  assert x.env_failed.tolist() == [0, 1] and x.truncated.tolist() == [0, 0]
  assert x.mask[1].sum() == 0


def test_a_conversation_that_is_too_long_is_cut_and_counts_as_truncated(
  folder, policy, actor
):
  def long(base_url, api_key, problem):
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
      messages = [{'role': 'user', 'content': 'x'}]
      for _ in range(4):
        reply = client.chat.completions.create(
          model='policy', messages=messages
        ).choices[0]
        messages += [reply.message, {'role': 'user', 'content': 'y' * 8}]
    return 1.0

  problem, x = play(folder, policy, actor, long, PROBLEMS[:1])
  assert problem.answer.truncated.tolist() == [1.0] * GROUP
  assert x.action.shape == (GROUP, LENGTH)
