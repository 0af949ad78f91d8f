"""Calls of agents are completed by an engine outside JAX, as they come."""

import concurrent.futures
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlinf_jax.engines import vllm, vllm_engine
from rlinf_jax.serve import batches, engine_decoder
import served_models
import stages
from stages import base
from stages.language import huggingface
from tests.rlinf_jax.serve import rollouts_test
import tiny
import vllm_models

BLOCK = 32
LONG = [{'say': 'hello hello hello'}, {'say': 'other words than these'}]


def job(prompt, limit, temperature=1.0):
  """A job, the tokens that it hears, and a future of how it ended."""
  heard, ended = [], concurrent.futures.Future()

  def hear(ids, logp):
    heard.append((ids, logp))
    return True

  key = jax.random.key(0)
  made = batches.Job(prompt, limit, key, temperature, hear, ended.set_result)
  return made, heard, ended


def decoder(resume, **kwargs):
  policy = tiny.policy()._replace(resume=resume, out_shapes=lambda *_: None)
  limits = {'stop': (0,), 'prompt_length': 6, 'response_length': 4}
  return engine_decoder.Decoder(policy, **limits, max_rows=2, **kwargs)


def empty(future):
  """Result of a `resume` whose row is read from `heard` alone."""
  return stages.Deferred(future, lambda x: x)


@pytest.mark.parametrize('is_engine', [False, True])
def test_a_decoder_that_was_closed_refuses_jobs(is_engine):
  """A job behind the end would wait for ever, and so would `drain`."""
  limits = {'stop': (0,), 'prompt_length': 6, 'response_length': 4}
  closed = (
    decoder(None) if is_engine else batches.Decoder(tiny.CONFIG, None, **limits)
  )
  closed.close()
  made, _, ended = job([1], 1)
  with pytest.raises(batches.BusyError, match='The server ends'):
    closed.submit(made)
  closed.drain()
  assert not ended.done()


def test_jobs_are_under_way_together_and_fail_alone():
  both, seen = threading.Barrier(2, timeout=30), []

  def resume(params, prompt, bits, completions, *, temperature, heard):
    both.wait()  # Neither comes before the other has started.
    shapes = prompt.mask.shape, completions.mask.shape
    seen.append((params, *shapes, temperature))
    future = concurrent.futures.Future()
    if temperature == 0:
      future.set_exception(ValueError('greedy fails'))
    else:
      heard([7], [-1.0])
      heard([8, 9], [-2.0, -3.0])
      future.set_result(None)
    return empty(future)

  some = decoder(resume)
  some.update('newest', 5)
  one, heard, ended = job([1, 2], 3, temperature=0.5)
  other, nothing, failed = job([1], 99, temperature=0.0)
  some.submit(one)
  some.submit(other)
  assert ended.result(30) == 5
  assert heard[-1] == ([7, 8, 9], [-1.0, -2.0, -3.0])
  assert str(failed.result(30)) == 'greedy fails' and not nothing
  some.drain()
  # Prompts have one width; a row has no more room than was asked for.
  assert sorted(seen, key=lambda x: x[-1]) == [
    ('newest', (1, 6), (1, 4), 0.0),
    ('newest', (1, 6), (1, 3), 0.5),
  ]


def test_a_job_hears_of_its_tokens_before_the_end_and_may_stop_there():
  future = concurrent.futures.Future()

  def resume(*args, temperature, heard):
    heard([7], [-1.0])
    return empty(future)

  some, heard, ended = decoder(resume), [], concurrent.futures.Future()

  def hear(ids, logp):
    heard.append((ids, logp))
    return False

  key = jax.random.key(0)
  some.submit(batches.Job([1], 4, key, 1.0, hear, ended.set_result))
  assert ended.result(30) == 0 and heard == [([7], [-1.0])]
  assert future.cancelled()  # The engine ends the row.


def test_draining_waits_for_jobs_that_were_cancelled():
  started = threading.Semaphore(0)
  futures = []

  def resume(*args, temperature, heard):
    futures.append(concurrent.futures.Future())
    started.release()
    return empty(futures[-1])

  some = decoder(resume)
  jobs = [job([1], 4) for _ in range(3)]  # One more than are waited for.
  for one, _, _ in jobs:
    some.submit(one)
  for _ in range(2):
    assert started.acquire(timeout=30)
  for one, _, _ in jobs:
    one.is_cancelled.set()
  some.drain()
  assert all(future.cancelled() for future in futures) and len(futures) == 2
  assert not any(heard for _, heard, _ in jobs)
  assert [ended.result(0) for _, _, ended in jobs] == [0, 0, 0]


def test_more_requests_than_may_wait_are_refused(monkeypatch):
  monkeypatch.setattr(engine_decoder, 'MAX_WAITING', 1)
  future = concurrent.futures.Future()
  some = decoder(lambda *args, temperature, heard: empty(future))
  for _ in range(3):  # Two at once, and one that waits.
    some.submit(job([1], 4)[0])
  with pytest.raises(batches.BusyError, match='try again later'):
    some.submit(job([1], 4)[0])
  future.set_result(None)
  some.drain()


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return served_models.model(tmp_path_factory.mktemp('served'), width=128)


@pytest.mark.slow
@vllm_models.marks[1]
def test_vllm_serves_agents_and_keeps_what_their_sessions_have_read(
  folder, monkeypatch
):
  policy = huggingface.policy(
    folder,
    response_length=rollouts_test.LENGTH,
    engine=functools.partial(vllm.engine, block_size=BLOCK, max_num_seqs=8),
  )
  params = policy.init(jax.random.key(0))
  kept, most, hear = [], [], vllm_engine.Engine._hear

  def heard(engine, pending, output):
    most.append(engine.llm.get_num_unfinished_requests())
    if output.finished:
      kept.append(output.num_cached_tokens)
    return hear(engine, pending, output)

  monkeypatch.setattr(vllm_engine.Engine, '_hear', heard)
  rows = []
  for step, scale in ((4, 1.0), (5, 1.1)):
    actor = base.Version(
      jax.tree.map(lambda x, scale=scale: x * scale, params), jnp.int32(step)
    )
    rollouts_test.heard.clear()
    problem, x = rollouts_test.play(
      folder, policy, actor, rollouts_test.agent, LONG
    )
    own_BT = x.mask > 0
    for i, reward in enumerate(problem.answer.reward):
      served = rollouts_test.heard[float(reward)]
      np.testing.assert_array_equal(x.logp[i][own_BT[i]], np.float32(served))
      assert problem.answer.terms['turns'][i] == 2
      assert (x.version[i][own_BT[i]] == step).all()
    scored = policy.evaluate(
      actor.params, x.obs, x.action, group_size=rollouts_test.GROUP
    )
    vllm_models.assert_close_where_real(x.logp, scored.logp, x.mask)
    rows.append(x.action)
  assert not np.array_equal(*rows)
  # Each of six sessions calls twice a step, and its second call is kept.
  assert len(kept) == 24 and sum(n >= BLOCK for n in kept) >= 12
  assert max(most) > 1
