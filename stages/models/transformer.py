"""A decoder-only transformer: Qwen2, Qwen3, Llama, Mistral and Gemma.

With a vision tower, it is Qwen2.5-VL: vectors of pictures take the places of
some tokens of prompts, and the tokens of a prompt have positions in a plane.

Grouped-query attention, rotary positions, RMSNorm and a gated feed-forward;
`Config` selects what the architectures differ in. The completions of a group
share their prompt, so a sequence is processed in two parts: the prompt once a
group, then each completion, which attends to the keys of its prompt and to its
own. Training and generation do this in the same way.

Layers are scanned. Layers with a sliding window take the positions and the
masks of local attention by a flag that is scanned beside their parameters.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from sharding import mesh as mesh_lib
from sharding import row_map, rules
from stages.models import block as block_lib
from stages.models import config as config_lib
from stages.models import stack
from stages.models.layers import (
  attention,
  initialize,
  mixed_precision,
  rounding,
)
from stages.models.layers import rope as rope_lib
from stages.models.vision import patches, window_vit

Config = config_lib.Config
IN_PLACE = 'tpu'  # The platform whose loops read slices of arrays in place.


class Transformer(nn.Module):
  """The model: embedding, scanned layers, final norm and output layer."""

  config: Config

  def setup(self):
    c = self.config
    self.embed_VD = block_lib.parameter(self, 'embed_VD', c.V, c.D)
    self.norm_D = block_lib.parameter(self, 'norm_D', c.D)
    if not c.tie_embeddings:
      self.unembed_DV = block_lib.parameter(self, 'unembed_DV', c.D, c.V)
    if c.vision is not None:
      self.tower = window_vit.WindowTower(c)
    in_axes = 0, nn.broadcast, nn.broadcast
    self.layers = stack.layers(block_lib.Block, c, in_axes)

  def embed(self, token_BT):
    return self._look_up({'embed_VD': self.embed_VD}, token_BT)

  def logits(self, x_BTD):
    """As `output_logits`."""
    params = {x: getattr(self, x) for x in output_names(self.config)}
    return output_logits(self.config, params, x_BTD)

  def prefill(
    self, token_NP, mask_NP, pictures: patches.Pictures | None = None
  ) -> attention.PromptCache:
    """Keys and values of prompts, padded anywhere; arguments as `__call__`."""
    return attention.PromptCache(*self._prompts(token_NP, mask_NP, pictures)[1])

  def embedded_states(self, x_NPD, mask_NP, *, bidirectional=False):
    """Final hidden states, keys and values of prompts that are vectors.

    Args:
      x_NPD: in place of embedded tokens, such as patches of a picture.
      mask_NP: one where there is a vector, zero on padding.
      bidirectional: whether each vector attends to all others, also later ones.
    """
    x_NPD, cache = self._prompt_layers(x_NPD, mask_NP, bidirectional)
    return x_NPD, attention.PromptCache(*cache)

  def hidden_states(self, token_NP, mask_NP, token_BT, start_B, pictures=None):
    """Final hidden states [B, T, D] of completions.

    Args:
      token_NP: prompts, one a group, padded anywhere.
      mask_NP: one where completions may attend.
      token_BT: completions; the rows of a group are adjacent.
      start_B: position of the first token of each.
      pictures: `patches.Pictures` of the prompts; None without any.
    """
    (N, P), (B, T) = token_NP.shape, token_BT.shape
    position_BT = start_B[:, None] + jnp.arange(T)[None]

    def pack(x_NP, x_BT):
      return jnp.concatenate([x_NP, x_BT.reshape(N, -1)], axis=1)

    def joined(x_NP, x_BT):
      x_BP = jnp.repeat(x_NP, B // N, axis=0)
      return jnp.concatenate([x_BP, x_BT], axis=1)

    position_NP, is_key_NP = positions(mask_NP), mask_NP > 0
    rotary = position_NP, position_BT
    if pictures is not None:
      # Time, row and column of a token that is written are the same.
      rotary = pictures.position, jnp.repeat(position_BT[..., None], 3, axis=-1)
    rotary = jnp.concatenate(
      [rotary[0], rotary[1].reshape(N, -1, *rotary[1].shape[2:])], axis=1
    )
    position_BC = joined(position_NP, position_BT)
    is_key_BC = joined(is_key_NP, jnp.ones((B, T), bool))

    def context(rope, window=None):
      masks = (
        attention.causal(is_key_NP, window, position_NP, position_NP),
        attention.causal(is_key_BC, window, position_BT, position_BC),
      )
      angles = rope_lib.angles(rope, self.config.W, rotary)
      return attention.Context(*angles, *masks)

    params, token_NS = {'embed_VD': self.embed_VD}, pack(token_NP, token_BT)
    x_NSD = row_map.map_rows(
      self._look_up, params, token_NS, dtype=self.config.dtype
    )
    x_NPD = self._insert(x_NSD[:, :P], token_NP, mask_NP, pictures)
    x_NSD = jnp.concatenate([x_NPD, x_NSD[:, P:]], axis=1)
    x_NSD, _ = self._stack(x_NSD, context)
    x_NSD = rules.gather_sequence(x_NSD)
    return x_NSD[:, P:].reshape(B, T, -1)

  def packed_states(self, token_MS, position_MS, segment):
    """Final hidden states [M, S, D] of packed rows.

    Args:
      token_MS: tokens; a prompt is before the completions that continue it.
      position_MS: position of each in its own prompt and completion.
      segment: `attention.Segment` of each.
    """

    def context(rope, window=None):
      mask = attention.causal(
        segment.group >= 0, window, position_MS, position_MS
      )
      mask = mask._replace(segment_BT=segment, segment_BC=segment)
      angles = rope_lib.angles(rope, self.config.W, position_MS)
      return attention.Context(*angles, mask)

    params = {'embed_VD': self.embed_VD}
    x_MSD = row_map.map_rows(
      self._look_up, params, token_MS, dtype=self.config.dtype
    )
    return rules.gather_sequence(self._stack(x_MSD, context)[0])

  def _look_up(self, params, token_BT):
    # Padding may hold any id; one out of range would give NaN.
    x_BTD = jnp.take(params['embed_VD'], token_BT, axis=0, mode='clip')
    x_BTD = x_BTD.astype(self.config.dtype)
    if self.config.scale_embeddings:
      x_BTD *= jnp.asarray(math.sqrt(self.config.D), x_BTD.dtype)
    return x_BTD

  def _insert(self, x_NPD, token_NP, mask_NP, pictures):
    """Vectors of prompts with those of pictures in the places of their tokens.

    The tokens of a row are filled in their order, with the pictures of the row
    one after the other.
    """
    if pictures is None:
      return x_NPD
    if self.config.vision is None:
      raise ValueError(
        'Prompts have pictures, and this model reads text alone: give a model '
        'with a vision tower (Qwen2.5-VL), or leave the pictures out.'
      )
    is_place_NP = (token_NP == self.config.vision.token) & (mask_NP > 0)
    index_NP = jnp.maximum(jnp.cumsum(is_place_NP, axis=1) - 1, 0)
    seen_NPD = jnp.take_along_axis(
      self.tower(pictures), index_NP[..., None], axis=1, mode='clip'
    )
    return jnp.where(is_place_NP[..., None], seen_NPD, x_NPD)

  def _stack(self, x_NSD, context):
    """All layers; `context: rope, window -> Context`."""
    c = self.config
    # Otherwise XLA would divide the positions of tokens and masks, too.
    x_NSD = rules.scatter_sequence(rules.shard(x_NSD, rules.WHOLE))
    if c.window is None:
      return self.layers(x_NSD, None, context(c.rope), None)
    is_local_L = jnp.array([c.is_local(i) for i in range(c.L)])
    nearby = context(c.local_rope or c.rope, c.window)
    # Both have a window, as one of them is chosen in each layer.
    everywhere = context(c.rope, jnp.iinfo(jnp.int32).max)
    return self.layers(x_NSD, is_local_L, everywhere, nearby)

  def _prompts(self, token_NP, mask_NP, pictures=None):
    x_NPD = self._insert(self.embed(token_NP), token_NP, mask_NP, pictures)
    rotary = None if pictures is None else pictures.position
    return self._prompt_layers(x_NPD, mask_NP, rotary=rotary)

  def _prompt_layers(self, x_NPD, mask_NP, bidirectional=False, rotary=None):
    """As `embedded_states`; `rotary` are positions other than those in rows."""
    position_NP = positions(mask_NP)
    rotary = position_NP if rotary is None else rotary

    def context(rope, window=None):
      mask = attention.causal(mask_NP > 0, window, position_NP, position_NP)
      if bidirectional:
        mask = mask._replace(order=attention.Bidirectional())
      angles = rope_lib.angles(rope, self.config.W, rotary)
      return attention.Context(*angles, mask)

    return self._stack(x_NPD, context)

  def __call__(
    self, token_NP, mask_NP, pictures: patches.Pictures | None = None
  ):
    """Logits after every token of padded sequences: the plain forward pass.

    Args:
      token_NP: tokens.
      mask_NP: one on tokens, zero on padding.
      pictures: pictures of the rows, and positions of their tokens; None
        without any.
    """
    return self.logits(self._prompts(token_NP, mask_NP, pictures)[0])


def output_names(config: Config) -> tuple[str, str]:
  """Names of the parameters of the final norm and of the output layer."""
  return 'norm_D', 'embed_VD' if config.tie_embeddings else 'unembed_DV'


def round_output(config: Config, params):
  """Parameters for several calls of `output_logits`, rounded once for all."""
  norm, matrix = output_names(config)
  rounded = mixed_precision.round_once(params[matrix], config.dtype)
  return {norm: params[norm], matrix: rounded}


def output_logits(config: Config, params, x_BTD):
  """Logits of the next token from final hidden states, in float32 or wider.

  Args:
    config: dimensions of the model.
    params: those of `output_names`, by name, or what `round_output` returns.
    x_BTD: final hidden states.
  """
  x_BTD = block_lib.rms_norm(config, x_BTD, params['norm_D'])
  if config.tie_embeddings:
    logit_BTV = mixed_precision.product(
      'BTD,VD->BTV', x_BTD, params['embed_VD']
    )
  else:
    unembed_DV = params['unembed_DV']
    logit_BTV = mixed_precision.product('BTD,DV->BTV', x_BTD, unembed_DV)
  return attention.soft_cap(logit_BTV, config.logit_softcap)


def positions(mask_NP):
  """Positions of tokens, without padding."""
  return jnp.cumsum(mask_NP, axis=1, dtype=jnp.int32) - 1


def layer_params(params: Any, i: int) -> Any:
  """Parameters of layer `i`."""
  return jax.tree.map(lambda x: x[i], params['layers'])


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Slice:
  """A layer of stacked parameters, for a loop that reads it where it is.

  It has no leaves, so that no copy is made where trees of arrays are passed on.

  Attributes:
    read: `() -> parameters`, called in the loop.
  """

  read: Callable[[], Any]


def layer(own: Any) -> Any:
  """The parameters of a layer: of a `Slice`, or as they are."""
  return own.read() if isinstance(own, Slice) else own


def are_ready(config: Config, params: Any) -> bool:
  """Whether decoding can read layers where they are, without copies.

  They are rounded and no device gathers them, and the compiler is that of TPUs:
  those of others would copy them in the loop.
  """
  rounded = jax.eval_shape(functools.partial(compute_params, config), params)
  same = jax.tree.map(lambda x, y: x.dtype == y.dtype, params, rounded)
  narrow = jnp.dtype(config.dtype) != config.param_dtype
  is_ready = narrow and mesh_lib.platform() == IN_PLACE
  return is_ready and all(jax.tree.leaves(same)) and not rules.gathers(params)


def unstacked(
  config: Config, params: Any, before: Any, in_place: bool = False
) -> tuple[list, Any]:
  """Parameters of every layer, of which XLA copies one matrix after another.

  A loop that reads each layer many times reads copies of its own. If XLA made
  them in any order, most of them would be in memory before the first parameter
  of all layers could be freed.

  Args:
    config: dimensions of the model.
    params: its parameters.
    before: what is computed before, such as what scans the layers.
    in_place: whether to return slices in place of copies.

  Returns:
    The parameters by layer, and `before`.
  """
  if in_place:
    reads = [
      functools.partial(layer_params, params, i) for i in range(config.L)
    ]
    return [Slice(read) for read in reads], before
  leaves, tree = jax.tree.flatten(params['layers'])
  by_leaf = []
  for leaf in leaves:
    leaf, before = jax.lax.optimization_barrier((leaf, before))
    if by_leaf:
      leaf, by_leaf[-1] = jax.lax.optimization_barrier((leaf, by_leaf[-1]))
    by_leaf.append([leaf[i] for i in range(config.L)])
  layers = zip(*by_leaf, strict=True)
  return [jax.tree.unflatten(tree, layer) for layer in layers], before


def compute_params(config: Config, params: Any) -> Any:
  """Parameters rounded once, for a call that reads each of them many times.

  Biases, norm scales and routers are used in the dtype that they are stored in,
  so they stay in it. The result of the model is the same as with `params`.
  """
  return rounding.round_matrices(params, config.dtype, kept=('router_DE',))


def param_shapes(config: Config) -> Any:
  """Shapes and types of the parameters of a model."""
  return jax.tree.map(lambda x: x, _shapes(config, jnp.result_type(float)))


@functools.lru_cache(maxsize=64)
def _shapes(config: Config, widest: Any) -> Any:
  """The same, also by the widest float type: a model is traced once."""
  del widest
  token_11 = jnp.zeros((1, 1), jnp.int32)
  pictures = None if config.vision is None else patches.blank(config.vision)
  model = Transformer(config)
  variables = jax.eval_shape(
    model.init, jax.random.key(0), token_11, token_11, pictures
  )
  return variables['params']


@functools.partial(jax.jit, static_argnums=0)
def init_params(config: Config, key: jax.Array) -> Any:
  """Random parameters: normal matrices, scales of one, biases of zero."""
  scale = 0.0 if config.unit_offset else 1.0
  return initialize.draw(param_shapes(config), key, config.init_stddev, scale)
