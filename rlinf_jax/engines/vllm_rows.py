"""Rows that vLLM goes on with between the calls that ask for them.

A call returns once enough of its rows have ended. vLLM decodes the others
meanwhile, and a later call that asks for one of them finds it under way. So a
call of some rows does not end those that it need not wait for, whose samples
are then the same as if it had waited. A row that is asked for with other
parameters is started anew.
"""

from collections.abc import Callable, Sequence, Set
from concurrent import futures
import threading
from typing import NamedTuple
import weakref

from rlinf_jax.engines import vllm_engine, vllm_instance, vllm_request

Key = tuple  # Of a request with one prompt: its prompt and its samples.


class _UnderWay(NamedTuple):
  """A row under way: weak references to its parameters, and its future."""

  params: tuple[weakref.ref, ...]
  future: futures.Future


class Rows:
  """The rows under way."""

  def __init__(self):
    self._under_way: dict[Key, _UnderWay] = {}
    self._lock = threading.Lock()

  def await_some(
    self,
    requests: Sequence[tuple[vllm_engine.Engine, vllm_request.Request]],
    should_stop: Callable[[Set[int]], bool],
  ) -> 'Some':
    """Starts rows that are not under way, to wait for enough of them.

    Args:
      requests: for each row its engine, and a request with one prompt.
      should_stop: whether enough have ended, given indices of those that have.
    """
    keys = [_key(request) for _, request in requests]
    with self._lock:
      self._forget_dead()
      missing = {}
      for key, (engine, request) in zip(keys, requests, strict=True):
        row = self._under_way.get(key)
        if row and vllm_instance.are(row.params, request.params):
          continue
        if row:  # The engine would finish it before it takes other parameters.
          row.future.cancel()
        missing.setdefault(engine, {})[key] = request
      for engine, some in missing.items():
        started = engine.submit_all([*some.values()])
        for (key, request), future in zip(some.items(), started, strict=True):
          self._under_way[key] = _UnderWay(
            vllm_instance.references(request.params), future
          )
      rows = [self._under_way[key].future for key in keys]
    return Some(rows, should_stop, lambda ended: self._drop(keys, ended))

  def _drop(self, keys: Sequence[Key], ended: Set[int]):
    """Forgets rows whose completions were returned, or that have failed."""
    with self._lock:
      for i in ended:
        self._under_way.pop(keys[i], None)

  def _forget_dead(self):
    """Forgets rows of freed parameters: no later call asks for them."""
    self._under_way = {
      key: row
      for key, row in self._under_way.items()
      if all(reference() is not None for reference in row.params)
    }


class Some:
  """The completions of those rows of a call that have ended when it returns."""

  def __init__(
    self,
    rows: Sequence[futures.Future],
    should_stop: Callable[[Set[int]], bool],
    drop: Callable[[Set[int]], None],
  ):
    """Takes the future of each row, and what forgets rows of some indices."""
    self._futures, self._should_stop, self._drop = rows, should_stop, drop
    self._ended = threading.Event()
    for future in rows:
      future.add_done_callback(lambda _: self._ended.set())

  def result(self) -> list[vllm_request.Completion | None]:
    """Waits for enough rows; None for those that go on.

    If one fails, the others are not needed.
    """
    while not self.done():
      self._ended.wait()
      self._ended.clear()
    ended = self._have_ended()
    try:
      found = [
        future.result()[0] if i in ended else None
        for i, future in enumerate(self._futures)
      ]
    except BaseException:
      self.cancel()
      raise
    self._drop(ended)
    return found

  def done(self) -> bool:
    ended = self._have_ended()
    failed = any(
      self._futures[i].cancelled() or self._futures[i].exception()
      for i in ended
    )
    return (
      failed or len(ended) == len(self._futures) or self._should_stop(ended)
    )

  def cancel(self):
    for future in self._futures:
      future.cancel()
    self._drop(set(range(len(self._futures))))

  def _have_ended(self) -> set[int]:
    return {i for i, future in enumerate(self._futures) if future.done()}


def _key(request: vllm_request.Request) -> Key:
  (prompt,), (sampling,) = request.prompts, request.sampling
  return (*prompt, sampling['seed'], sampling['temperature'])
