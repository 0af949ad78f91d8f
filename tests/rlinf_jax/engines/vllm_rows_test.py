"""Rows that an engine goes on with between calls; without vLLM."""

from concurrent import futures

import jax.numpy as jnp

from rlinf_jax.engines import vllm_request, vllm_rows


class Engine:
  """Records requests, which the test ends."""

  def __init__(self):
    self.futures = []

  def submit_all(self, requests):
    started = [futures.Future() for _ in requests]
    self.futures += started
    return started


def request(params, token):
  return vllm_request.Request(
    params, {}, [[token]], [{'seed': token, 'temperature': 1.0}], 8
  )


def call(rows, engine, params, tokens=(1, 2)):
  """A call that returns as soon as one row has ended."""
  pairs = [(engine, request(params, token)) for token in tokens]
  return rows.await_some(pairs, lambda ended: len(ended) > 0)


def test_a_row_that_was_left_is_found_under_way():
  rows, engine, params = vllm_rows.Rows(), Engine(), {'w': jnp.zeros(1)}
  some = call(rows, engine, params)
  first, second = engine.futures
  first.set_result(['one'])
  assert some.result() == ['one', None]
  again = call(rows, engine, params, tokens=(2,))
  assert engine.futures == [first, second]
  second.set_result(['two'])
  assert again.result() == ['two']


def test_a_row_of_other_parameters_is_ended_and_started_anew():
  """As where a step leaves conversations to the next one."""
  rows, engine = vllm_rows.Rows(), Engine()
  old, new = {'w': jnp.zeros(1)}, {'w': jnp.zeros(1)}
  some = call(rows, engine, old)
  first, second = engine.futures
  first.set_result(['one'])
  some.result()
  again = call(rows, engine, new, tokens=(2,))
  assert second.cancelled()
  third = engine.futures[2]
  third.set_result(['three'])
  assert again.result() == ['three']
