"""Classifies the primitives of a jaxpr: arithmetic, views, loops."""

import math

# Calls that XLA inlines.
CALLS = ('jaxpr', 'call_jaxpr', 'fun_jaxpr')
CONTROL = ('scan', 'while', 'cond', 'shard_map')
# Views: no arithmetic, and no memory of their own.
VIEWS = {
  'bitcast_convert_type',
  'copy',
  'expand_dims',
  'optimization_barrier',
  'reshape',
  'slice',
  'squeeze',
  'stop_gradient',
  'transpose',
  'dynamic_slice',
  'random_unwrap',
  'random_wrap',
  'sharding_constraint',
}
# Elementwise, as far as fusion goes, but without arithmetic.
MOVES = {
  'broadcast_in_dim',
  'concatenate',
  'convert_element_type',
  'iota',
  'pad',
  'rev',
  'select_n',
  'split',
}
# Fused with the chain that they read; one operation an element read.
REDUCES = ('reduce_', 'argmax', 'argmin')
SCANS = ('cumsum', 'cumprod', 'cummax', 'cummin', 'cumlogsumexp')
# Threefry: twenty rounds of five operations for two words, and some more.
OPERATIONS = {'random_bits': 55, 'random_fold_in': 110, 'random_seed': 110}
# Always a kernel of their own.
HEAVY = {
  'conv_general_dilated',
  'dot_general',
  'ragged_dot_general',
  'sort',
  'top_k',
  'triangular_solve',
  'cholesky',
  'reduce_window_max',
  'reduce_window_sum',
  'reduce_window',
  'select_and_scatter_add',
  'custom_call',
  *SCANS,
}


def letters_of(eqn, letters):
  """Returns the letters of a view's dimensions; None if unknown."""
  name, (out,) = eqn.primitive.name, eqn.outvars
  if name == 'transpose':
    return tuple(letters[i] for i in eqn.params['permutation'])
  if name == 'squeeze':
    gone = eqn.params['dimensions']
    return tuple(x for i, x in enumerate(letters) if i not in gone)
  if name == 'broadcast_in_dim':
    place = dict(zip(eqn.params['broadcast_dimensions'], letters, strict=True))
    return tuple(place.get(i, '') for i in range(len(out.aval.shape)))
  if name == 'reshape':
    return _reshaped(eqn.invars[0].aval.shape, letters, out.aval.shape)
  return letters if len(letters) == len(out.aval.shape) else None


def _reshaped(old, letters, new):
  """Returns letters after a reshape.

  The first of several merged or split dimensions has the letter, as the
  outermost one is sharded.
  """
  made, i = [], 0
  for size in new:
    if i < len(old) and (size == old[i] or size > 1):
      made.append(letters[i])
      have = old[i]
      i += 1
      while have < size and i < len(old):
        have, i = have * old[i], i + 1
      if have > size:  # Split: the remainder has no letter.
        if have % size:
          return None
        old = (*old[:i], have // size, *old[i:])
        letters = (*letters[:i], '', *letters[i:])
    else:
      made.append('')
  return tuple(made)


def product_flops(eqn) -> float:
  """Returns the operations of a product: two for each multiply-add."""
  if eqn.primitive.name == 'ragged_dot_general':
    return _ragged_flops(eqn)
  numbers, sizes = eqn.params['dimension_numbers'], eqn.invars[0].aval.shape
  if eqn.primitive.name == 'dot_general':
    each = math.prod(sizes[i] for i in numbers[0][0])
  else:  # Grouped filters have the depth of a group already.
    kernel = eqn.invars[1].aval
    each = kernel.size // kernel.shape[numbers.rhs_spec[0]]
    # In the gradient of a strided convolution, zeros lie between its numbers.
    each /= math.prod(eqn.params['lhs_dilation'])
  return 2.0 * eqn.outvars[0].aval.size * each


def _ragged_flops(eqn) -> float:
  """Returns the operations of a product whose rows belong to groups.

  Every row is multiplied by the matrix of its own group, however long the
  groups are.
  """
  numbers = eqn.params['ragged_dot_dimension_numbers']
  sizes, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval
  over = numbers.dot_dimension_numbers[0][0]
  flops = 2.0 * out.size * math.prod(sizes[i] for i in over)
  if set(numbers.lhs_ragged_dimensions) <= set(over):
    # A sum over rows for each group: the first dimension is the group.
    flops /= out.shape[0]
  return flops
