"""Conversations whose turns vLLM takes, with what it keeps between them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import in_memory
from planner.ir import plan as plan_lib
from rlinf_jax.engines import vllm, vllm_engine, vllm_rows
from rlinf_jax.runtime import local
from stages import base, workflows
from stages.language import conversation, huggingface, policy_stages
from stages.learn import optimizers
import tiny
import toy_conversation
import vllm_models

pytestmark = vllm_models.marks

LENGTH, TURNS, GROUP, ROWS, BLOCK = 64, 8, vllm_models.GROUP, 12, 32
PROMPT = 70  # Several blocks, which updates must not leave behind.
ENGINE = {
  'max_num_seqs': 16,
  'max_model_len': PROMPT + LENGTH,
  'block_size': BLOCK,
}
# Every fourth token ends a turn, so that rows have several of them.
SIZES = vllm_models.SIZES | {'eos_token_id': [*range(3, 96, 4)]}


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp('model')
  sizes = SIZES | {'tie_word_embeddings': True}
  vllm_models.reference(sizes, 0).save_pretrained(folder)
  return vllm_models.Case(sizes, str(folder))


def policy(model, engine=functools.partial(vllm.engine, **ENGINE)):
  return model.policy(engine, response_length=LENGTH)


def play(some, params, slots=None, order=None, seed=2, greedy=False):
  prompt = vllm_models.prompts(ROWS, PROMPT, seed=3)
  run = conversation.converse(
    some,
    'generate',
    group_size=GROUP,
    greedy=greedy,
    envs=toy_conversation.envs(slots, order),
    max_turns=TURNS,
  )
  keys = jax.random.split(jax.random.key(seed), ROWS)
  problem = base.Problem(prompt, jnp.zeros(ROWS))
  return run(base.Version(params, jnp.int32(0)), problem, keys)


@pytest.fixture
def requests(monkeypatch):
  """The requests of rows that engines get, and what they return."""
  seen, submit = [], vllm_engine.Engine.submit_all

  def submit_all(engine, some):
    started = submit(engine, some)
    seen.extend(zip(some, started, strict=True))
    return started

  monkeypatch.setattr(vllm_engine.Engine, 'submit_all', submit_all)
  return seen


def test_greedy_conversations_equal_those_of_the_model(model):
  own, params = policy(model, None), policy(model).init(jax.random.key(0))
  problem, got = play(policy(model), params, greedy=True)
  expected, want = play(own, params, greedy=True)
  np.testing.assert_array_equal(got.action, want.action)
  np.testing.assert_array_equal(got.mask, want.mask)
  np.testing.assert_array_equal(got.truncated, want.truncated)
  vllm_models.assert_close_where_real(got.logp, want.logp, got.mask)
  np.testing.assert_array_equal(
    problem.answer.turns.reward, expected.answer.turns.reward
  )
  assert problem.answer.terms['turns'].max() > 1


def test_turns_that_were_read_before_are_kept_and_not_sampled_again(
  model, requests
):
  params = policy(model).init(jax.random.key(0))
  _, x = play(policy(model), params)
  want = policy(model).evaluate(params, x.obs, x.action, group_size=GROUP)
  vllm_models.assert_close_where_real(x.logp, want.logp, x.mask)
  seeds, kept, computed = set(), 0, {}
  for request, future in requests:
    (prompt,), (sampling,) = request.prompts, request.sampling
    (done,) = future.result()
    seeds.add(sampling['seed'])
    before = [n for p, n in computed.items() if tuple(prompt[: len(p)]) == p]
    # vLLM has computed all that was said but the last token of a turn.
    least = max(before, default=0) // BLOCK * BLOCK
    assert least <= done.kept < len(prompt)
    kept += least
    text = (*prompt, *done.token)
    computed[text] = len(text) - 1
  own_BT = np.pad(np.asarray(x.mask), ((0, 0), (1, 0)))
  assert len(requests) == (np.diff(own_BT) > 0).sum()  # One a turn.
  assert len(seeds) == len(requests)
  assert kept >= 10 * BLOCK  # Otherwise the test shows little.


def test_nothing_is_kept_of_other_parameters(model):
  """Without vLLM's cache being emptied, log-probs would be of both models."""
  some = policy(model)
  params = some.init(jax.random.key(0))
  play(some, params)
  other = jax.tree.map(lambda x: x * 1.1, params)
  _, x = play(some, other)
  want = some.evaluate(other, x.obs, x.action, group_size=GROUP).logp
  vllm_models.assert_close_where_real(x.logp, want, x.mask)
  stale = some.evaluate(params, x.obs, x.action, group_size=GROUP).logp
  assert np.abs(np.asarray(stale - want) * x.mask).max() > 0.1


def test_when_turns_and_answers_come_changes_no_token(model, monkeypatch):
  """With slots, rows go on in vLLM while a call returns without them."""
  some = policy(model)
  params = some.init(jax.random.key(0))
  _, want = play(some, params)
  left, result = [], vllm_rows.Some.result

  def counted(rows):
    found = result(rows)
    left.append(sum(x is None for x in found))
    return found

  monkeypatch.setattr(vllm_rows.Some, 'result', counted)
  for order in (0, 1):
    _, got = play(some, params, slots=4, order=order)
    np.testing.assert_array_equal(got.action, want.action)
    np.testing.assert_array_equal(got.mask, want.mask)
    vllm_models.assert_close_where_real(got.logp, want.logp, got.mask)
  assert sum(left) > 10


def test_a_plan_sends_parameters_once_a_step_and_tells_the_gap(
  model, monkeypatch
):
  grpo = workflows.grpo(
    policy(model),
    conversation.episode_return(),
    optimizers.adamw(3e-3),
    group_size=GROUP,
    rollouts=functools.partial(
      policy_stages.complete,
      converse=toy_conversation.converse(TURNS, slots=4),
    ),
  )
  batch = base.Problem(
    jax.tree.map(lambda x: x[::GROUP], vllm_models.prompts(16, PROMPT)),
    jnp.zeros(8),
  )
  step = tiny.trace(grpo, batch)
  plan = plan_lib.parse(
    vllm_models.PLAN
    | {'pieces': 2, 'stages': {'generate': 'actor', '*': 'learner'}},
    step.stages,
  )
  engine = vllm_engine.get(_settings(model))
  before = engine.weight_version
  runtime = local.LocalRuntime(plan, step=step)
  in_memory.start(runtime, grpo.init(jax.random.key(0)))
  for i in range(3):
    info = tiny.read(jax.device_get(runtime.step(batch, jax.random.key(i))))
    assert 0 < info['rollout/logprob_gap_mean'] < 1e-4
    assert info['rollout/logprob_gap_max'] < 1e-3
    assert info['train/grad_norm'] > 0
  runtime.close()
  assert engine.weight_version == before + 3


def _settings(model):
  config = huggingface.load_config(model.folder)
  return vllm_engine.vllm_start.Settings(
    model.folder, config, kv_cache_memory_bytes=None, **ENGINE
  )


def test_blocks_that_a_cpu_does_not_have_are_refused(model):
  small = functools.partial(vllm.engine, block_size=16)
  with pytest.raises(ValueError, match='blocks of 32 tokens or a multiple'):
    policy(model, small)
