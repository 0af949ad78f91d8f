"""The work of attention in a kernel, by its shapes and the blocks it computes.

A kernel skips blocks whose keys are all later than the queries, so its work
depends on values that a jaxpr does not show.
"""

import math
import re
from typing import Any, NamedTuple

SPLASH = re.compile(r'splash_m[hq]a_(fwd|dq|dkv)')
CUDNN = {
  'dot_product_attention_fwd_wrapper': 'fwd',
  'dot_product_attention_bwd_wrapper': 'bwd',
}
PRIMITIVES = ('pallas_call', *CUDNN)
# Products of scores with queries or keys, and with values or their gradients.
PRODUCTS = {'fwd': (1, 1), 'dq': (2, 1), 'dkv': (2, 2), 'bwd': (3, 2)}
TILE = 128  # Assumed of cuDNN: queries and keys of a block.
OPERATIONS = 5  # On each score: scaled, masked, subtracted, exp, added.


class Attention(NamedTuple):
  """A call of an attention kernel.

  Attributes:
    phase: 'fwd', or 'dq' and 'dkv', or 'bwd' of the backward pass.
    heads: number of heads of queries, of all rows.
    queries: number of queries, T.
    keys: number of keys, C.
    width: of queries and keys.
    value_width: of values.
    query_block: queries of a block.
    key_block: keys of a block.
    is_causal: whether a query attends to keys up to its own, where the last
      query has the last key; otherwise to all keys.
  """

  phase: str
  heads: int
  queries: int
  keys: int
  width: int
  value_width: int
  query_block: int
  key_block: int
  is_causal: bool = True

  @property
  def pairs(self) -> int:
    """Scores that are computed for a head, in whole blocks."""
    before = self.keys - self.queries
    starts = range(0, self.queries, self.query_block)
    last = (
      min(start + self.query_block, self.queries) + before
      if self.is_causal
      else self.keys
      for start in starts
    )
    blocks = sum(-(-keys // self.key_block) for keys in last)
    return blocks * self.query_block * self.key_block

  @property
  def matmul_flops(self) -> float:
    """Operations of its products: two for each multiply-add."""
    of_keys, of_values = PRODUCTS[self.phase]
    each = of_keys * self.width + of_values * self.value_width
    return 2.0 * self.heads * self.pairs * each

  @property
  def vector_flops(self) -> float:
    """All other operations."""
    return float(OPERATIONS * self.heads * self.pairs)

  @property
  def blocks_read(self) -> float:
    """Numbers read as blocks follow each other.

    Queries meet block after block of keys and values; in phase 'dkv', keys meet
    block after block of queries and gradients.
    """
    fixed = self.key_block if self.phase == 'dkv' else self.query_block
    return self.heads * self.pairs / fixed * (self.width + self.value_width)


def check(name: str | None):
  """Raises NotImplementedError for a kernel that is not known."""
  if not SPLASH.match(name or ''):
    raise NotImplementedError(
      f'{name or "A Pallas call"} is a kernel that cannot be counted: give its '
      'stage measured seconds instead.'
    )


def splash(name: str, shapes, query_block: int, key_block: int) -> Attention:
  """The call of a splash kernel.

  Args:
    name: of the kernel.
    shapes: of queries [*, T, W], keys [*, C, W] and values [*, C, V].
    query_block: queries of a block.
    key_block: keys of a block.

  """
  phase = SPLASH.match(name)[1]
  q, k, v = shapes
  heads = math.prod(q[:-2])
  return Attention(
    phase, heads, q[-2], k[-2], q[-1], v[-1], query_block, key_block
  )


def cudnn(phase: str, shapes, mask_type: str) -> Attention:
  """The call of cuDNN's attention.

  Args:
    phase: 'fwd' or 'bwd'.
    shapes: of queries [B, T, H, W], keys [B, C, K, W] and values [B, C, K, V].
    mask_type: JAX's name of the mask: 'NO_MASK', 'PADDING', 'CAUSAL' or
      'PADDING_CAUSAL'.
  """
  (B, T, H, W), k, v = shapes
  is_causal = mask_type.endswith('CAUSAL')
  return Attention(phase, B * H, T, k[1], W, v[-1], TILE, TILE, is_causal)


def count(counter, eqn, args) -> list[Any]:
  """Counts an equation of `PRIMITIVES`; returns its results.

  Args:
    counter: a `jaxpr_walk.WorkCounter`.
    eqn: the equation.
    args: its operands, as abstract values.

  Raises:
    NotImplementedError: for a kernel that is not known.
  """
  call, dtype = _call(eqn)
  for variable in args:
    counter.store(variable)
    if variable.partial:
      variable.partial.open = False
  counter.moved += sum(counter.read(variable) for variable in args)
  made = counter.stored_results(eqn, args)
  counter.moved += sum(variable.size for variable in made)
  counter.moved += call.blocks_read * dtype.itemsize
  counter.kernels += 1
  counter.add_matmul(str(dtype), call.matmul_flops)
  counter.flops += call.matmul_flops + call.vector_flops
  return made


def _call(eqn) -> tuple[Attention, Any]:
  """Returns the call that an equation makes, and the type of its numbers."""
  arrays, mapping = [x.aval for x in eqn.invars], eqn.params.get('grid_mapping')
  if mapping is None:
    shapes = [x.shape for x in arrays[:3]]
    mask_type = eqn.params['mask_type'].name
    call = cudnn(CUDNN[eqn.primitive.name], shapes, mask_type)
    return call, arrays[0].dtype
  check(eqn.params['name'])
  arrays = arrays[mapping.num_index_operands :][:3]
  blocks = (x.block_shape[-2].block_size for x in mapping.block_mappings[:2])
  call = splash(eqn.params['name'], [x.shape for x in arrays], *blocks)
  return call, arrays[0].dtype
