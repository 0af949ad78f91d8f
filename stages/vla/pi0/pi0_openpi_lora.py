"""Adapters in openpi's parameter tree of π0 and π0.5, added to its matrices.

openpi's low-memory fine-tuning (`gemma_2b_lora`, `gemma_300m_lora`) keeps
adapters A and B beside the einsums of attention, `w` with `lora_a` and
`lora_b`, and beside those of feed-forwards, `linear` with `linear_lora_a` and
`linear_lora_b`. They stand for the last two axes of a matrix, and their scale,
alpha/rank, is 1 in all published configurations.
"""

from collections.abc import Mapping

import numpy as np

from stages.models.files import weights

A, B = 'lora_a', 'lora_b'
OUTPUT = '/attn_vec_einsum'  # Of attention, with or without a suffix.


def merge(found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Adds the adapters to their matrices, and leaves them out.

  Args:
    found: arrays of openpi's tree by their paths; layers are the first axis.

  Returns:
    The arrays without adapters, w + A B in float32 for those that had them.

  Raises:
    CheckpointError: if an adapter has no partner or no matrix, or does not fit
      its matrix.
  """
  merged = {k: x for k, x in found.items() if not k.endswith((A, B))}
  for path in found:
    if not path.endswith((A, B)):
      continue
    stem = path.removesuffix(A).removesuffix(B)
    name = f'{stem}w' if stem.endswith('/') else stem.removesuffix('_')
    if not {f'{stem}{A}', f'{stem}{B}', name} <= found.keys():
      raise weights.CheckpointError(
        f'{path} is an adapter of {name}, and {name}, {stem}{A} and {stem}{B} '
        'are not all there: copy the checkpoint again.'
      )
    if path.endswith(A):
      arrays = (np.asarray(found[x]) for x in (name, path, f'{stem}{B}'))
      merged[name] = _added(name, *arrays)
  return merged


def _added(name: str, w, a, b) -> np.ndarray:
  """w + A B over the last two axes, in float32."""
  rank = a.shape[-1] if a.ndim else 0
  if (
    w.ndim < 2
    or a.shape != (*w.shape[:-1], rank)
    or b.shape != (*w.shape[:-2], rank, w.shape[-1])
  ):
    raise weights.CheckpointError(
      f'The adapters of {name}, {[*w.shape]}, are {[*a.shape]} and '
      f'{[*b.shape]}, expected {[*w.shape[:-1], "rank"]} and '
      f'{[*w.shape[:-2], "rank", *w.shape[-1:]]}: copy the checkpoint again.'
    )
  a, b = np.float32(a), np.float32(b)
  if OUTPUT in name:
    # openpi sums A's outputs over the heads before B, [L, H, rank, D], reads
    # them, and then over B's: each head has the sum of all heads' B.
    b = b.sum(axis=-3, keepdims=True)
  return np.float32(w) + a @ b
