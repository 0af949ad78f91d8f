"""Scoring completions in packed rows, which hold several without padding.

A packed row has room for a fixed number of tokens. Each completion is put into
one of them, after the prompt that it continues; completions of a group that
share a packed row share the prompt, or have copies of it (see `sharing`).
Attention separates what does not belong together, so that log-probabilities
equal those without packing, up to rounding.

Shapes are those of the worst case, in which all prompts and completions have
their maximum length. The loop over packed rows ends after the last one that is
used, in the forward and in the backward pass, so empty ones cost nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from sharding import rules
from stages import base, kernels
from stages.language.decoding import prefill, routing_replay
from stages.models.layers import attention, mixed_precision

# The longest prompt, as a share of the longest completion, that is still copied
# for each completion so that a kernel can compute attention.
SHORT_PROMPT = 0.25


class Assignment(NamedTuple):
  """Positions of the completions of a batch in packed rows.

  Attributes:
    row: packed row of each completion.
    start: position of its first token there.
    prompt_start: position of the first token of its prompt there.
    brings_prompt: whether it is the first completion there of its group, so
      that its prompt takes room.
    size: tokens of each packed row; 0 in those that are not used.
  """

  row: Int[Array, ' B']
  start: Int[Array, ' B']
  prompt_start: Int[Array, ' B']
  brings_prompt: Bool[Array, ' B']
  size: Int[Array, ' M']


class PackedRows(NamedTuple):
  """Packed rows, as the model reads them.

  Attributes:
    token: tokens to read.
    position: position of each in its own prompt and completion.
    segment: group and completion of each, which attention keeps apart.
    action: the completion token that is predicted after each.
    expert: the experts of each that are replayed, [..., S, L, k], or None.
  """

  token: Int[Array, '*rows S']
  position: Int[Array, '*rows S']
  segment: attention.Segment
  action: Int[Array, '*rows S']
  expert: Array | None = None


def sharing(group_size: int, P: int, T: int) -> int:
  """The number of adjacent completions that share a prompt in a packed row.

  It is `group_size`, or 1 where the kernel of attention knows packed rows but
  no shared prompts, and prompts are short (`SHORT_PROMPT`). Each completion
  then has its own copy.

  Args:
    group_size: adjacent rows that have the same prompt.
    P: maximum tokens of a prompt.
    T: maximum tokens of a completion.
  """
  if kernels.knows_packed_rows() and P <= SHORT_PROMPT * T:
    return 1
  return group_size


def num_rows(B: int, max_tokens: int, capacity: int) -> int:
  """The packed rows that `assign` may need for `B` completions.

  A packed row is opened only if the others have no room. Then each of them has
  more than `capacity` − `max_tokens` tokens, so at least
  ⌊`capacity` / `max_tokens`⌋ completions.

  Args:
    B: number of completions.
    max_tokens: of a prompt and its completion together.
    capacity: tokens that a packed row has room for.

  Raises:
    ValueError: if there is no room for the longest completion.
  """
  if capacity < max_tokens:
    raise ValueError(
      f'A packed row has room for {capacity} tokens, and a prompt and its '
      f'completion may have {max_tokens} together: set packed_tokens '
      f'(PACKED in gin) to {max_tokens} or more, or to None.'
    )
  return -(-B // (capacity // max_tokens))


def assign(prompt_N, length_B, capacity: int, M: int) -> Assignment:
  """Assigns completions to packed rows, first fit decreasing.

  Groups come in order of their longest sequence, the longest first, and
  completions of a group in order of their length. Each is put into the first
  packed row that has its prompt and room for it, or else into the first that
  has room for both. Ties keep the order of the batch.

  Args:
    prompt_N: tokens of the prompt of each group.
    length_B: tokens of each completion. Those without tokens take no room.
    capacity: tokens that a packed row has room for.
    M: packed rows, at least `num_rows`.
  """
  N, B = prompt_N.shape[0], length_B.shape[0]
  group_B = jnp.arange(B) // (B // N)
  longest_N = prompt_N + length_B.reshape(N, -1).max(1)
  order_B = jnp.lexsort((-length_B, group_B, -longest_N[group_B]))
  is_first_B = jnp.arange(B) % (B // N) == 0

  def put(carry, x):
    size_M, prompt_start_M = carry
    prompt, length, is_first = x
    # Negative where this group has no prompt yet.
    prompt_start_M = jnp.where(is_first, -1, prompt_start_M)
    lacks_M = prompt_start_M < 0
    fits_M = size_M + length + lacks_M * prompt <= capacity
    row = jnp.argmin(jnp.where(fits_M, lacks_M, 2))
    brings = lacks_M[row] & (length > 0)
    prompt_start = jnp.where(brings, size_M[row], prompt_start_M[row])
    start = size_M[row] + brings * prompt
    size_M = size_M.at[row].set(
      jnp.where(length > 0, start + length, size_M[row])
    )
    prompt_start_M = prompt_start_M.at[row].set(prompt_start)
    return (size_M, prompt_start_M), (row, start, prompt_start, brings)

  blank_M = jnp.zeros(M, jnp.int32)
  rows = prompt_N[group_B[order_B]], length_B[order_B], is_first_B
  (size_M, _), assigned = jax.lax.scan(put, (blank_M, blank_M), rows)
  unsorted = jax.tree.map(
    lambda x_B: jnp.zeros_like(x_B).at[order_B].set(x_B), assigned
  )
  return Assignment(*unsorted, size_M)


def lengths(mask_BT):
  """Tokens of each completion up to the last one of its mask, int32 [B]."""
  T = mask_BT.shape[1]
  return jnp.where(mask_BT > 0, 1 + jnp.arange(T, dtype=jnp.int32), 0).max(1)


def assign_batch(mask_BP, mask_BT, group_size: int, capacity: int, n: int = 1):
  """Assigns completions, by the masks of prompts and completions.

  The last token of a prompt is read with each completion, whose first token it
  predicts, so it is not part of the prompt here.

  Args:
    mask_BP: 1 on tokens of prompts.
    mask_BT: 1 on tokens of completions.
    group_size: adjacent rows that share a prompt.
    capacity: tokens that a packed row has room for.
    n: the number of packed rows is a multiple of it.
  """
  (B, P), T = mask_BP.shape, mask_BT.shape[1]
  M = n * -(-num_rows(B, P - 1 + T, capacity) // n)
  # A prompt without tokens has no last one either.
  prompt_N = mask_BP[::group_size].sum(1, dtype=jnp.int32) - 1
  prompt_N = jnp.maximum(prompt_N, 0)
  return assign(prompt_N, lengths(mask_BT), capacity, M)


def pack(
  assigned: Assignment,
  prompt: base.Prompt,
  action_BT,
  mask_BT,
  group_size,
  capacity,
  routing: routing_replay.Routing | None = None,
) -> PackedRows:
  """Copies prompts and completions to their positions in packed rows [M, S]."""
  B, T = action_BT.shape
  split = prefill.split_prompt(prompt, group_size)
  token_BT = jnp.concatenate(
    [split.token_B[:, None], action_BT[:, :-1]], axis=1
  )
  position_BT = split.position_B[:, None] + jnp.arange(T)[None]
  mask_NP = split.mask_NP
  position_NP = jnp.cumsum(mask_NP, axis=1, dtype=jnp.int32) - 1
  P = mask_NP.shape[1]

  def repeated(x_NP):
    return jnp.repeat(x_NP, group_size, axis=0)

  first_B = capacity * assigned.row
  nowhere = capacity * assigned.size.shape[0]
  to_BP = (first_B + assigned.prompt_start)[:, None] + repeated(position_NP)
  is_copied_BP = (repeated(mask_NP) > 0) & assigned.brings_prompt[:, None]
  to_BP = jnp.where(is_copied_BP, to_BP, nowhere)
  is_read_BT = jnp.arange(T)[None] < lengths(mask_BT)[:, None]
  to_BT = jnp.where(is_read_BT, _indices(assigned, T, capacity), nowhere)
  # Number of the token in prompts and completions one after the other.
  source = jnp.full(nowhere, -1, jnp.int32)
  source = source.at[to_BP].set(_count(B, P), mode='drop')
  source = source.at[to_BT].set(B * P + _count(B, T), mode='drop')
  is_completion = source >= B * P

  def take(ahead, own):
    shape = own.shape[2:]
    flat = [x.reshape(-1, *shape) for x in (ahead, own)]
    is_empty = jnp.expand_dims(source < 0, range(1, 1 + len(shape)))
    return jnp.where(is_empty, 0, jnp.concatenate(flat)[source])

  row = jnp.where(is_completion, (source - B * P) // T, source // P)
  segment = attention.Segment(
    group=jnp.where(source < 0, -1, row // group_size),
    # In groups of one, tokens of the same group are of one completion.
    row=jnp.where(is_completion, row, -1) if group_size > 1 else None,
  )
  packed = PackedRows(
    take(repeated(split.prompt_NP), token_BT),
    take(repeated(position_NP), position_BT),
    segment,
    jnp.where(is_completion, action_BT.reshape(-1)[source - B * P], 0),
    None if routing is None else take(*routing),
  )
  return jax.tree.map(lambda x: x.reshape(-1, capacity, *x.shape[1:]), packed)


def _count(*shape: int):
  return jnp.arange(shape[0] * shape[1], dtype=jnp.int32).reshape(shape)


def _indices(assigned: Assignment, T: int, capacity: int):
  """Position of each completion token among those of all packed rows."""
  first_B = capacity * assigned.row + assigned.start
  return first_B[:, None] + jnp.arange(T)[None]


def evaluate(
  score: Callable[[Any, PackedRows], tuple[Any, Any]],
  params,
  prompt: base.Prompt,
  action_BT,
  mask_BT,
  routing: routing_replay.Routing | None = None,
  *,
  group_size: int,
  capacity: int,
) -> tuple[Any, Any]:
  """Scores completions in packed rows; 0 where the mask is 0.

  Args:
    score: `params, rows -> scores, totals`: trees of the scores of every
      position of packed rows, and of sums over these rows.
    params: parameters of the model.
    prompt: prompts of the completions.
    action_BT: tokens of completions.
    mask_BT: 1 on tokens to score. The tokens before them are read, too.
    routing: the experts of each token; None for those of the router.
    group_size: adjacent rows that share a prompt.
    capacity: tokens that a packed row has room for.

  Returns:
    Scores [B, T], and the sums over all packed rows.
  """
  prompt, action_BT, mask_BT = jax.tree.map(
    jnp.asarray, (prompt, action_BT, mask_BT)
  )
  (B, P), T = prompt.mask.shape, action_BT.shape[1]
  group_size = sharing(group_size, P, T)
  n = rules.devices_of('B', B)
  assigned = assign_batch(prompt.mask, mask_BT, group_size, capacity, n)
  packed = pack(
    assigned, prompt, action_BT, mask_BT, group_size, capacity, routing
  )
  packed = jax.tree.map(lambda x: x.reshape(-1, n, *x.shape[1:]), packed)
  used = -(-(assigned.size > 0).sum() // n)
  scored, totals = _while_used(score)(params, packed, used)
  # Indices of tokens that are not read may be out of range.
  index_BT = jnp.where(mask_BT > 0, _indices(assigned, T, capacity), 0)
  scored = jax.tree.map(
    lambda x: jnp.where(mask_BT > 0, x.reshape(-1)[index_BT], 0.0), scored
  )
  return scored, jax.tree.map(lambda x: x.sum(0), totals)


def _while_used(score: Callable) -> Callable:
  """Returns `params, rows, used -> scores` of the first `used` rows.

  Each of the packed `rows` [steps, n, S] is a turn of a loop. The backward pass
  is a loop over the same ones, which computes the activations of each again:
  only one turn's are in memory. Parameters that are not differentiated have no
  gradient there.
  """

  def step(params, rows, i):
    row = jax.tree.map(lambda x: rules.shard_rows(x[i]), rows)
    return score(params, row)

  # The shapes of its results and the loop need one trace of the model alone.
  traced_once = jax.jit(step, inline=True)

  @jax.custom_vjp
  def run(params, rows, used):
    steps = rows.token.shape[0]
    if steps == 1:
      return jax.tree.map(lambda x: x[None], step(params, rows, 0))
    shapes = jax.eval_shape(traced_once, params, rows, jnp.int32(0))
    blank = jax.tree.map(
      lambda x: jnp.zeros((steps, *x.shape), x.dtype), shapes
    )

    def write(i, scored):
      return jax.tree.map(
        lambda all_, x: all_.at[i].set(x), scored, traced_once(params, rows, i)
      )

    return _loop(steps, used, write, blank)

  def forward(params, rows, used):
    is_trained = jax.tree.map(lambda x: x.perturbed, params)
    params, rows, used = jax.tree.map(lambda x: x.value, (params, rows, used))
    trained = jax.tree.map(lambda x, y: x if y else None, params, is_trained)
    fixed = jax.tree.map(lambda x, y: None if y else x, params, is_trained)
    return run(params, rows, used), (trained, fixed, rows, used)

  def backward(saved, slopes):
    trained, fixed, rows, used = saved
    slopes, tree = jax.tree.flatten(slopes)
    # Outputs that nothing reads, such as entropies, are not differentiated.
    is_read = [not isinstance(x, _SymbolicZero) for x in slopes]
    slopes = [x for x, keep in zip(slopes, is_read, strict=True) if keep]

    def add(i, total):
      def outputs(trained):
        params = _either(trained, fixed)
        scored = jax.tree.leaves(step(params, rows, i))
        return [x for x, keep in zip(scored, is_read, strict=True) if keep]

      _, pullback = jax.vjp(outputs, trained)
      (grads,) = pullback([x[i] for x in slopes])
      return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, grads)

    # At least float32, as a sum over turns.
    zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, mixed_precision.wide_dtype(x.dtype)), trained
    )
    total = _loop(rows.token.shape[0], used, add, zeros)
    total = jax.tree.map(lambda x, y: x.astype(y.dtype), total, trained)
    return total, None, None

  run.defvjp(forward, backward, symbolic_zeros=True)
  return run


_SymbolicZero = jax.custom_derivatives.SymbolicZero


def _either(trained, fixed):
  return jax.tree.map(
    lambda x, y: y if x is None else x,
    trained,
    fixed,
    is_leaf=lambda x: x is None,
  )


def _loop(steps: int, used, body: Callable, carry):
  """Calls `body: i, carry -> carry` for the first `used` of `steps` turns."""
  if steps == 1:
    return body(0, carry)

  def goes_on(state):
    # The planner reads the maximum trip count from the first comparison.
    return (state[0] < steps) & (state[0] < used)

  def turn(state):
    i, carry = state
    return i + 1, body(i, carry)

  return jax.lax.while_loop(goes_on, turn, (jnp.int32(0), carry))[1]
