"""Times the host stages of a recipe on this machine, without running a step.

A reward function runs on a processor, and so it can be timed where a plan is
made for accelerators that are not here. It is called on random tokens. Others,
such as simulators, have the seconds that were given.
"""

from collections.abc import Mapping, Sequence
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

from planner import formatting
from planner.ir import graph
from rlinf_jax.isolation import pool

SECONDS = 1.0  # For each stage.
REPEATS = 5  # Calls with the most rows, of which the fastest counts.
# Tokens are drawn below these numbers; a small vocabulary needs a small one.
MOST_TOKENS = (1000, 10, 1)


def seconds_per_row(
  flow: graph.Flow, seconds: float = SECONDS
) -> dict[str, float]:
  """Times the host stages of a flow that can be called with any rows.

  Stages that use up a token of a simulator, read parameters, or return later,
  as engines do, are left out; so are those that fail on random tokens.

  Args:
    flow: as recorded.
    seconds: to spend on a stage, beyond its first call.

  Returns:
    Seconds of a row, by stage.
  """
  found = {}
  for node in flow.nodes:
    if node.name not in found and _can_be_timed(flow, node):
      took = _time(flow, node, seconds)
      found |= {} if took is None else {node.name: took}
  return found


def parse(texts: Sequence[str]) -> dict[str, float]:
  """Reads seconds of a row, by stage, from texts such as 'simulate=0.02'.

  Raises:
    ValueError: for any other text, or a stage that is given twice.
  """
  found = {}
  for text in texts:
    name, _, number = text.partition('=')
    try:
      seconds = float(number)
    except ValueError:
      seconds = math.nan
    if not name or not 0 <= seconds < math.inf:
      raise ValueError(
        f'{text!r} should be the name of a host stage and its seconds for a '
        "row, such as 'simulate=0.02'."
      )
    if name in found:
      raise ValueError(
        f'Seconds of {name!r} are given twice, {found[name]:g} and '
        f'{seconds:g}: give one of them.'
      )
    found[name] = seconds
  return found


def check(flow: graph.Flow, given: Mapping[str, float]):
  """Refuses seconds of stages that do not run on the host.

  Raises:
    ValueError: names those stages, and the ones that do.
  """
  hosts = dict.fromkeys(
    node.name
    for node in flow.nodes
    if node.stage.host and not graph.is_plumbing(node)
  )
  if wrong := given.keys() - hosts:
    raise ValueError(
      f'Seconds of a row were given for {", ".join(sorted(wrong))}, and the '
      f'host stages of the recipe are {", ".join(hosts) or "none"}.'
    )


def describe(
  found: Mapping[str, float], given: Mapping[str, float]
) -> str | None:
  """Lists what was timed and what was given; None if nothing was."""
  sentences = []
  for start, each in (
    ('Timed on this machine, on random tokens,', found),
    ('Given', given),
  ):
    if each:
      listed = ', '.join(
        f'{name} {formatting.seconds(x)}' for name, x in each.items()
      )
      sentences.append(f'{start} for each row: {listed}.')
  return ' '.join(sentences) or None


def _can_be_timed(flow, node) -> bool:
  stage = node.stage
  return (
    not graph.is_plumbing(node)
    and stage.host
    and stage.grain == 'row'
    and not (stage.consumes or stage.asynchronous or stage.engine)
    and set(node.reads) == set(node.rows)
    and not any(_is_key(flow.values[v].dtype) for v in node.reads)
  )


def _is_key(dtype) -> bool:
  return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _time(flow, node, seconds: float) -> float | None:
  """Returns the seconds of a row of a stage; None if it fails on all tokens."""
  for most in MOST_TOKENS:
    try:
      return _fastest_row(flow, node, seconds, most)
    # A verifier is foreign code, which may raise anything, on any row.
    except Exception:  # noqa: BLE001
      continue
  return None


def _fastest_row(flow, node, seconds: float, most: int) -> float:
  """Times a stage on a group, then on twice as many rows while there is time.

  The call with the most rows is repeated while there is time. Another process
  may keep the processor from a call of milliseconds for many times as long, and
  so the fastest row counts, of all calls. A call before them is not timed.

  Returns:
    Seconds of a row in the call with the fastest.
  """
  rows, all_rows = node.stage.group_size, flow.rows_of(node)
  # It may import, or start processes, each for a row of its own.
  groups = -(-pool.default_processes() // rows)
  _call(flow, node, min(groups * rows, all_rows), most)
  end = time.monotonic() + seconds
  fastest, repeats = _call(flow, node, rows, most) / rows, 1
  while repeats < REPEATS:
    following = 2 * rows if 2 * rows <= all_rows else rows
    if time.monotonic() + following * fastest > end:
      break
    repeats = repeats + 1 if following == rows else 1
    rows = following
    fastest = min(fastest, _call(flow, node, rows, most) / rows)
  return fastest


def _call(flow, node, rows: int, most: int) -> float:
  """Returns the seconds of a call on random numbers."""
  rng = np.random.default_rng(0)
  given = [_random(rng, flow.values[v], rows, most) for v in node.reads]
  arguments = jax.tree.unflatten(node.in_tree, given)
  start = time.perf_counter()
  node.stage.fn(*arguments)
  return time.perf_counter() - start


def _random(rng, value, rows: int, most: int) -> np.ndarray:
  """Returns whole numbers below `most`, or ones for masks."""
  shape, dtype = (rows, *value.shape[1:]), np.dtype(value.dtype)
  if dtype.kind in 'iu':
    return rng.integers(0, most, shape).astype(dtype)
  return np.ones(shape, dtype)
