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
CUDNN = 'cudnn'  # NVIDIA's kernel, by `jax.nn`.
CHUNKED = 'chunked'  # Written in JAX, some queries at a time.
DECODE_ATTENTION = 'decode_attention'  # JAX's kernel for GPUs, in Triton.
PAGED_ATTENTION = 'paged_attention'  # JAX's kernel for TPUs, in Mosaic.
BLOCKS = 'blocks of the cache'  # In JAX, as far as the longest row needs.
WHOLE = 'the whole cache'  # In JAX.
SETTINGS = (AUTO, SPLASH, CUDNN, CHUNKED)
KERNELS = {'tpu': SPLASH, 'gpu': CUDNN}  # By platform.
# By platform, what reads the columns of rows in slots.
DECODING = {'tpu': PAGED_ATTENTION, 'gpu': DECODE_ATTENTION, 'cpu': BLOCKS}
OF_DECODING = (DECODE_ATTENTION, PAGED_ATTENTION)
# Kernels that know rows of several sequences, as long as they share no prompt.
OF_PACKED_ROWS = (SPLASH,)


class Choice(NamedTuple):
  """An implementation of attention.

  Attributes:
    name: one of `SETTINGS`, or of what `DECODING` may choose.
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


def choose(
  setting: str, obstacle: Callable[[str], str | None], is_short: bool
) -> Choice:
  """The implementation of attention for the platform that is traced for.

  Args:
    setting: a member of `SETTINGS`.
    obstacle: says why a kernel cannot compute this call; None if it can.
    is_short: whether sequences are shorter than a block of the kernel.

  Raises:
    ValueError: if the setting asks for a kernel that cannot compute the call.
  """
  platform = mesh_lib.platform()
  kernel = KERNELS.get(platform) if setting == AUTO else setting
  why = kernel and kernel != CHUNKED and obstacle(kernel)
  if why and setting != AUTO:
    raise ValueError(
      f'attention={setting!r} cannot compute this model: {why}. Set '
      f'attention={AUTO!r}, which computes such a call in chunks.'
    )
  if setting == AUTO and kernel and is_short:
    why = 'sequences are short'
  return _record(Choice(CHUNKED, why) if why else Choice(kernel or CHUNKED))


def choose_for_decoding(
  setting: str, obstacle: Callable[[str], str | None], is_short: bool
) -> Choice:
  """Chooses what reads the cache of rows in slots, on the platform traced for.

  Args:
    setting: a member of `SETTINGS`; `CHUNKED` for no kernel.
    obstacle: says why a kernel cannot compute this model; None if it can.
    is_short: whether there are too few columns for a kernel.
  """
  name = DECODING.get(mesh_lib.platform(), WHOLE)
  if name not in OF_DECODING:
    return _record(Choice(name))
  if setting == CHUNKED:
    return _record(Choice(WHOLE, f'attention is {CHUNKED!r}'))
  why = 'completions are short' if is_short else obstacle(name)
  return _record(Choice(WHOLE, why) if why else Choice(name))


def _record(choice: Choice) -> Choice:
  """Adds a choice to those of the stage that is traced."""
  platform, found = mesh_lib.platform(), _chosen.get()
  if found is not None:
    found.setdefault(platform, set()).add(choice)
  return choice


def knows_packed_rows() -> bool:
  """Whether the platform that is traced for has a kernel for packed rows."""
  return KERNELS.get(mesh_lib.platform()) in OF_PACKED_ROWS


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
