"""The parameter tree of openpi's π0 and π0.5 in JAX, as parameters of `pi0`.

Layers are stacked on the first axis in both. In openpi's tree, matrices of the
expert stand beside those of the trunk, with the suffix `_1`; keys and values
are one array, and so are gate and up of a feed-forward.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from stages import tree_paths
from stages.models.files import weights
from stages.vla.pi0 import adaptive, pi0, pi0_openpi_lora

TOWER, LLM = 'PaliGemma/img', 'PaliGemma/llm'
EXPERT_SUFFIX = '_1'


class Leaf(NamedTuple):
  """The place of a parameter in openpi's tree.

  Attributes:
    path: of openpi's array.
    shape: `shape of the parameter -> shape of openpi's array`.
    read: `openpi's array -> parameter`, as a view of it.
  """

  path: str
  shape: Callable[[tuple[int, ...]], tuple[int, ...]]
  read: Callable[[np.ndarray], np.ndarray]


def params(config: pi0.Config, tree: Mapping):
  """The parameters that openpi's tree holds.

  Args:
    config: sizes of the model.
    tree: nested mappings of arrays. The last keys may all be `value`, as
      openpi's training writes them. Adapters are added to their matrices.

  Raises:
    CheckpointError: names all arrays that are missing, extra or of another
      shape than those of `config`.
  """
  found = tree_paths.flatten(dict(tree))
  if found and all(name.endswith('/value') for name in found):
    found = {name.removesuffix('/value'): x for name, x in found.items()}
  found = pi0_openpi_lora.merge(found)
  wanted = tree_paths.flatten(pi0.param_shapes(config))
  leaves = dict(leaves_of(config))
  faults, made = [], {}
  for name, like in wanted.items():
    leaf = leaves[name]
    if leaf.path not in found:
      faults.append(f'missing {leaf.path}')
      continue
    x, shape = np.asarray(found[leaf.path]), leaf.shape(like.shape)
    if x.shape != shape:
      faults.append(f'{leaf.path} is {[*x.shape]}, expected {[*shape]}')
      continue
    made[name] = np.ascontiguousarray(leaf.read(x), like.dtype)
    weights.check_finite(leaf.path, made[name])
  known = {leaf.path for leaf in leaves.values()}
  faults += [f'extra {name}' for name in sorted(found.keys() - known)]
  if faults:
    faults = [*dict.fromkeys(faults)]  # A shared array has one fault.
    more = len(faults) - weights.MOST_FAULTS
    shown = '; '.join(faults[: weights.MOST_FAULTS])
    raise weights.CheckpointError(
      'These are not the parameters of openpi for this model: '
      f'{shown}{f"; and {more} more" if more > 0 else ""}.'
    )
  return jax.tree.map(np.asarray, tree_paths.unflatten(made))


def tree(config: pi0.Config, params) -> dict:
  """The tree that openpi has of parameters: the inverse of `params`."""
  given, made = tree_paths.flatten(params), {}
  for name, leaf in leaves_of(config):
    x = np.asarray(given[name])
    whole = made.setdefault(leaf.path, np.empty(leaf.shape(x.shape), x.dtype))
    # A view, so that parameters that share an array fill their parts of it.
    leaf.read(whole)[...] = x
  return tree_paths.unflatten(made)


def leaves_of(config: pi0.Config) -> Iterator[tuple[str, Leaf]]:
  """Yields the path of each parameter, and where it is in openpi's tree."""
  yield from _tower()
  yield 'trunk/embed_VD', _same(f'{LLM}/embedder/input_embedding')
  yield from _transformer('trunk', '', is_adaptive=False)
  yield from _transformer('expert', EXPERT_SUFFIX, is_adaptive=config.adaptive)
  time = 'time_mlp' if config.adaptive else 'action_time_mlp'
  for ours, letters, theirs in (
    ('action_in', 'AD', 'action_in_proj'),
    ('action_out', 'DA', 'action_out_proj'),
    ('time_in', 'OD', f'{time}_in'),
    ('time_out', 'FD', f'{time}_out'),
    *(() if config.adaptive else [('state', 'OD', 'state_proj')]),
  ):
    yield from _affine(f'expert/{ours}', letters, theirs)


def _same(path: str) -> Leaf:
  return Leaf(path, lambda shape: shape, lambda x: x)


def _affine(ours: str, letters: str, theirs: str) -> Iterator:
  """A kernel and a bias, of which ours ends in the letters of the outputs."""
  yield f'{ours}_{letters}', _same(f'{theirs}/kernel')
  outputs = letters[1:]
  yield f'{ours}_bias_{outputs}', _same(f'{theirs}/bias')


def _tower() -> Iterator[tuple[str, Leaf]]:
  """Arrays of SigLIP, which are those of big_vision, and of the projector."""
  yield (
    'vision/patch_DOUU',
    Leaf(
      f'{TOWER}/embedding/kernel',
      lambda shape: (*shape[2:], shape[1], shape[0]),
      lambda x: x.transpose(3, 2, 0, 1),
    ),
  )
  yield 'vision/patch_bias_D', _same(f'{TOWER}/embedding/bias')
  yield (
    'vision/position_PD',
    Leaf(f'{TOWER}/pos_embedding', lambda shape: (1, *shape), lambda x: x[0]),
  )
  block = f'{TOWER}/Transformer/encoderblock'
  attention = f'{block}/MultiHeadDotProductAttention_0'
  layers = 'vision/layers'
  for name in 'query', 'key', 'value':
    yield f'{layers}/{name}_DHW', _same(f'{attention}/{name}/kernel')
    yield f'{layers}/{name}_bias_HW', _same(f'{attention}/{name}/bias')
  yield f'{layers}/out_HWD', _same(f'{attention}/out/kernel')
  yield f'{layers}/out_bias_D', _same(f'{attention}/out/bias')
  for i, (ours, letters) in enumerate((('up', 'DF'), ('down', 'FD'))):
    theirs = f'{block}/MlpBlock_0/Dense_{i}'
    yield f'{layers}/{ours}_{letters}', _same(f'{theirs}/kernel')
    yield f'{layers}/{ours}_bias_{letters[1]}', _same(f'{theirs}/bias')
  for ours, theirs in (
    (f'{layers}/before_attention', f'{block}/LayerNorm_0'),
    (f'{layers}/before_feedforward', f'{block}/LayerNorm_1'),
    ('vision/norm', f'{TOWER}/Transformer/encoder_norm'),
  ):
    yield f'{ours}_D', _same(f'{theirs}/scale')
    yield f'{ours}_bias_D', _same(f'{theirs}/bias')
  yield from _affine('projector/out', 'OD', f'{TOWER}/head')


def _transformer(
  ours: str, suffix: str, *, is_adaptive: bool
) -> Iterator[tuple[str, Leaf]]:
  """Arrays of Gemma: of the trunk, or of the expert."""
  layers, theirs = f'{ours}/layers', f'{LLM}/layers'
  # [L, H, D, W] there.
  swapped = lambda shape: (shape[0], shape[2], shape[1], shape[3])
  yield (
    f'{layers}/query_DHW',
    Leaf(
      f'{theirs}/attn/q_einsum{suffix}/w', swapped, lambda x: x.swapaxes(1, 2)
    ),
  )
  for i, name in enumerate(('key', 'value')):
    yield (
      f'{layers}/{name}_DKW',
      Leaf(
        f'{theirs}/attn/kv_einsum{suffix}/w',
        lambda shape: (shape[0], 2, *swapped(shape)[1:]),
        lambda x, i=i: x[:, i].swapaxes(1, 2),
      ),
    )
  yield f'{layers}/out_HWD', _same(f'{theirs}/attn/attn_vec_einsum{suffix}/w')
  for i, name in enumerate(('gate', 'up')):
    yield (
      f'{layers}/{name}_DF',
      Leaf(
        f'{theirs}/mlp{suffix}/gating_einsum',
        lambda shape: (shape[0], 2, *shape[1:]),
        lambda x, i=i: x[:, i],
      ),
    )
  yield f'{layers}/down_FD', _same(f'{theirs}/mlp{suffix}/linear')
  for norm, path in (
    (f'{layers}/before_attention', f'{theirs}/pre_attention_norm{suffix}'),
    (f'{layers}/before_feedforward', f'{theirs}/pre_ffw_norm{suffix}'),
    (f'{ours}/norm', f'{LLM}/final_norm{suffix}'),
  ):
    if is_adaptive:
      yield from _adaptive_norm(norm, f'{path}/Dense_0')
    else:
      yield f'{norm}_D', _same(f'{path}/scale')


def _adaptive_norm(ours: str, theirs: str) -> Iterator[tuple[str, Leaf]]:
  """The three parts of an affine map, which stand side by side there."""
  parts = adaptive.PARTS
  wide = lambda shape: (*shape[:-1], len(parts) * shape[-1])
  for i, part in enumerate(parts):
    read = lambda x, i=i: np.split(x, len(parts), axis=-1)[i]
    yield f'{ours}_{part}_OD', Leaf(f'{theirs}/kernel', wide, read)
    yield f'{ours}_{part}_bias_D', Leaf(f'{theirs}/bias', wide, read)
