"""Keys and values of completions in parts, each of which is filled in a loop.

A token attends to all columns of the arrays that it reads. In one array for all
tokens these are the columns of the longest completion, most of them empty. Here
it reads its own part, and those before it, which are full.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

MAX_PARTS = 4  # For each of them, a loop is compiled.
MIN_COLUMNS = 256  # Of a part.
MULTIPLE = 128  # Parts but the last have a multiple of so many columns.


def part_columns(length: int, max_parts: int = MAX_PARTS) -> tuple[int, ...]:
  """Columns of the parts for completions of up to `length` tokens."""
  parts = max(1, min(max_parts, length // MIN_COLUMNS))
  each = -(-length // (parts * MULTIPLE)) * MULTIPLE if parts > 1 else length
  starts = range(0, length, each)
  return tuple(min(each, length - start) for start in starts)


def decode(extend: Callable, may_continue: Callable, state, later: Sequence):
  """Samples until a part of the caches is full, and then goes on in the next.

  Args:
    extend: `earlier, state -> state`: samples one more token of each row, which
      attends to the parts `earlier` and to the one in the state.
    may_continue: `state ->` whether to sample another one.
    state: a NamedTuple, such as `generate.DecodeState`, whose `caches` are the
      first part: for each layer, a `kv_cache.LayerCache`.
    later: the other parts, which are empty.

  Returns:
    The last state, with the part that was used last.
  """
  earlier = []
  for part in (state.caches, *later):
    columns = part[0].key.shape[2]

    def condition(count_state, columns=columns):
      count, state = count_state
      return (count < columns) & may_continue(state)

    def body(count_state, earlier=tuple(earlier)):
      count, state = count_state
      return count + 1, extend(earlier, state)

    # Counted from zero in each part, so that its length is known.
    start = jnp.zeros((), jnp.int32), state._replace(caches=tuple(part))
    # By the name of the scope, the planner knows that their turns add up.
    with jax.named_scope('decoded_parts'):
      _, state = jax.lax.while_loop(condition, body, start)
    earlier.append(state.caches)
  return state
