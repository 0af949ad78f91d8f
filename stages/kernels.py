"""Kernels: which implementation of attention a model's layers get.

A model reads the platform that it is traced for from the ambient mesh. So the
choice is right for devices that are not here, too, as when a plan is compiled
ahead of time. What was chosen is recorded for each stage.
"""

from collections.abc import Callable, Iterable, Mapping
import contextvars
import functools
from typing import NamedTuple

from sharding import mesh as mesh_lib

AUTO = 'auto'
SPLASH = 'splash'  # JAX's kernel for TPUs, in Pallas.
CHUNKED = 'chunked'  # Written in JAX, some queries at a time.
SETTINGS = (AUTO, SPLASH, CHUNKED)
HARDWARE = {SPLASH: 'tpu'}


class Choice(NamedTuple):
  """An implementation of attention.

  Attributes:
    name: one of `SETTINGS`.
    why: what rules out the kernel of the hardware; empty if there is none.
  """

  name: str
  why: str = ''

  def __str__(self):
    return f'{self.name} ({self.why})' if self.why else self.name


# By platform, what the stage that is being traced has chosen.
_chosen = contextvars.ContextVar('kernels', default=None)


def check(setting: str):
  """Raises ValueError unless there is such an implementation."""
  if setting in SETTINGS:
    return
  raise ValueError(
    f'attention {setting!r} is not one of {SETTINGS}: leave it at {AUTO!r}, '
    'which takes the kernel of the hardware where there is one.'
  )


def choose(setting: str, obstacle: str | None, is_short: bool) -> Choice:
  """The implementation of attention for the platform that is traced for.

  Args:
    setting: a member of `SETTINGS`.
    obstacle: why the kernel cannot compute this call; None if it can.
    is_short: whether sequences are shorter than a block of the kernel.

  Raises:
    ValueError: if the setting asks for a kernel that cannot compute the call.
  """
  platform = mesh_lib.platform()
  if setting == CHUNKED:
    choice = Choice(CHUNKED)
  elif setting == SPLASH:
    if obstacle:
      raise ValueError(
        f'attention={SPLASH!r} cannot compute this model: {obstacle}. Set '
        f'attention={AUTO!r}, which computes such a call in chunks.'
      )
    choice = Choice(SPLASH)
  elif platform != HARDWARE[SPLASH]:
    choice = Choice(CHUNKED)
  elif obstacle or is_short:
    choice = Choice(CHUNKED, obstacle or 'sequences are short')
  else:
    choice = Choice(SPLASH)
  found = _chosen.get()
  if found is not None:
    found.setdefault(platform, set()).add(choice)
  return choice


def recorded(fn: Callable, found: dict[str, set[Choice]]) -> Callable:
  """Returns `fn` for tracing, whose choices are added to `found`.

  Args:
    fn: a function that JAX can trace.
    found: choices by platform.
  """

  @functools.wraps(fn)
  def run(*args):
    token = _chosen.set(found)
    try:
      return fn(*args)
    finally:
      _chosen.reset(token)

  return run


def describe(chosen: Mapping[str, Iterable[Choice]]) -> str:
  """Names implementations, and the stages of each; '' if there are none.

  Args:
    chosen: choices by the name of a stage.
  """
  stages = {}
  for name, choices in chosen.items():
    for choice in sorted(choices):
      stages.setdefault(str(choice), []).append(name)
  return '; '.join(
    f'{choice} in {", ".join(names)}' for choice, names in stages.items()
  )
