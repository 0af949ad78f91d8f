"""The work of a step of the engine beside vLLM's own; without vLLM."""

import sys
import threading
import types

import pytest

from rlinf_jax.engines import vllm_engine, vllm_request, vllm_start

SETTINGS = vllm_start.Settings('nowhere', '', 1, 1, None)


class Model:
  """vLLM, which ends a prompt at each step that a test does not leave out."""

  def __init__(self, on_step=lambda i: True):
    self.names, self.aborted, self._on_step = [], [], on_step
    self._num_steps = 0

  def add_request(self, name, prompt, params, lora_request):
    self.names.append(name)

  def abort_request(self, names):
    self.aborted += names
    self.names = [name for name in self.names if name not in names]

  def step(self):
    self._num_steps += 1
    if not self._on_step(self._num_steps) or not self.names:
      return []
    new = types.SimpleNamespace(
      token_ids=[7],
      logprobs=types.SimpleNamespace(logprobs=[-1.0]),
      finish_reason='stop',
      weight_versions=[types.SimpleNamespace(version='0')],
    )
    return [
      types.SimpleNamespace(
        request_id=self.names.pop(0),
        outputs=[new],
        finished=True,
        num_cached_tokens=0,
      )
    ]


@pytest.fixture
def start(monkeypatch):
  """Returns `model -> engine`, which has started it."""
  kinds = types.SimpleNamespace(DELTA=0, FINAL_ONLY=1)
  fake = types.ModuleType('vllm')
  fake.SamplingParams = lambda **how: how
  fake.sampling_params = types.SimpleNamespace(RequestOutputKind=kinds)
  monkeypatch.setitem(sys.modules, 'vllm', fake)
  engines = []

  def with_model(model):
    engine = vllm_engine.Engine(SETTINGS)
    engine._instance = types.SimpleNamespace(
      llm=model,
      lora=None,
      asleep=False,
      max_model_len=8,
      has=lambda params: True,
      wake=lambda: None,
      death=lambda: None,
      close=lambda: None,
    )
    engines.append(engine)
    return engine

  yield with_model
  for engine in engines:
    engine.close()


def request(should_stop=None, prompts=1):
  return vllm_request.Request(
    None, {}, [[1]] * prompts, [{}] * prompts, 8, should_stop
  )


def reads_of_steps(start, monkeypatch, rows):
  """Reads of requests in each step; every other step ends a request."""
  reads, at_step = [0], []

  class Counted(vllm_request.Pending):
    def __getattribute__(self, name):
      reads[0] += 1
      return super().__getattribute__(name)

  monkeypatch.setattr(vllm_request, 'Pending', Counted)

  def on_step(i):
    at_step.append(reads[0])
    return i % 2 == 0

  started = start(Model(on_step)).submit_all([request() for _ in range(rows)])
  for future in started:
    (found,) = future.result(30)
    assert found == vllm_request.Completion((7,), (-1.0,), True)
  assert len(at_step) == 2 * rows
  return [b - a for a, b in zip(at_step, at_step[1:], strict=False)]


def test_a_step_visits_the_requests_that_have_changed(start, monkeypatch):
  few, many = (reads_of_steps(start, monkeypatch, n) for n in (4, 64))
  assert set(few[::2]) == set(many[::2]) == {0}
  assert set(few[1::2]) == set(many[1::2]) != {0}


def test_a_request_stops_by_what_has_ended_elsewhere(start):
  model, elsewhere = Model(lambda i: False), []

  def should_stop(ended):
    assert not ended
    elsewhere.append(1)
    return len(elsewhere) > 3

  engine = start(model)
  found = engine.submit(request(should_stop, prompts=2)).result(30)
  assert found == 2 * [vllm_request.Completion((), (), False)]
  assert model.aborted == ['0', '1']


def test_a_cancelled_request_is_aborted_and_others_end(start):
  has_started = threading.Event()

  def on_step(i):
    has_started.set()
    return bool(model.aborted)

  model = Model(on_step)
  first, second = start(model).submit_all([request(prompts=2), request()])
  assert has_started.wait(30)
  assert first.cancel()
  (found,) = second.result(30)
  assert found.ended
  assert model.aborted == ['0', '1']
