"""Reports the first failure of a reward; later ones are only counted."""

import math
import threading

from rlinf_jax.system import notices


class Report:
  """Notifies the user of the first failure of a reward, from any thread."""

  def __init__(self, name: str):
    """Takes the name of the reward."""
    self._name, self._done, self._lock = name, False, threading.Lock()

  def __call__(self, why: str):
    """Reports why a completion has no reward, unless another one was."""
    with self._lock:
      if not self._done:
        notices.notify(
          f'The reward {self._name} failed on a completion, which counts as 0 '
          f'({why}). Others that fail are only counted.'
        )
      self._done = True

  def number(self, value) -> float:
    """A result of the reward as a number, NaN where it failed.

    Args:
      value: what the reward returned, or the exception that it raised.
    """
    if isinstance(value, Exception):
      self(f'{type(value).__name__}: {value}')
      return math.nan
    try:
      number = float(value)
    except Exception as error:  # noqa: BLE001 (`__float__` of foreign code.)
      self(
        f'it returned {type(value).__name__}, and a number is expected: {error}'
      )
      return math.nan
    if not math.isfinite(number):
      self(f'it returned {number}, and a finite number is expected')
    return number
