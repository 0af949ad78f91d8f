"""Requests that come while vLLM is closed."""

import pytest

from rlinf_jax.engines import vllm_engine, vllm_request, vllm_start

SETTINGS = vllm_start.Settings('nowhere', '', 1, 1, None)
REQUEST = vllm_request.Request(None, {}, [[1]], [{}], 8)


def test_a_request_that_comes_while_vllm_ends_fails(monkeypatch):
  engine, late = vllm_engine.Engine(SETTINGS), []
  monkeypatch.setattr(engine, '_open', lambda limit: 1 / 0)
  monkeypatch.setattr(
    engine, '_stop', lambda: late.append(engine.submit(REQUEST))
  )
  with pytest.raises(ZeroDivisionError):
    engine.submit(REQUEST).result(30)
  engine.close()
  with pytest.raises(RuntimeError, match='vLLM was closed'):
    late[0].result(1)
  assert not engine._waiting
