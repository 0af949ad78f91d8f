"""Dimensions and settings of a decoder-only transformer."""

import dataclasses
import typing
from typing import Literal

import jax.numpy as jnp

from stages import kernels
from stages import remat as remat_lib
from stages.models.layers import attention, mixed_precision
from stages.models.layers import rope as rope_lib

Activation = Literal['silu', 'gelu_tanh']
DTYPES = 'float32', 'bfloat16', 'float64'


def check_dtype(dtype: str):
  """Refuses arithmetic that no model is trained in.

  Raises:
    ValueError: for a type that is not one of `DTYPES`.
  """
  if dtype not in DTYPES:
    raise ValueError(
      f'Arithmetic in {dtype} is not supported, as gradients of float16 are '
      'rounded to zero below 6e-8: choose one of '
      f'{", ".join(DTYPES)} (dtype of huggingface.policy).'
    )


@dataclasses.dataclass(frozen=True)
class VisionConfig:
  """Dimensions and settings of the vision tower of Qwen2.5-VL.

  Attributes:
    D: width of the tower.
    L: number of layers.
    H: number of heads, which divides `D`.
    F: width of the feed-forward.
    token: id of the token in whose places a model reads a picture.
    full_layers: layers in which a patch attends to its whole picture; in the
      others, to its window.
    window: edge of a window, in patches.
    patch_size: edge of a patch, in pixels.
    frames: frames that a patch of a film has; a picture is in all of them.
    merge: edge of a square of patches that becomes one token, in patches.
    rope: rotary embedding of the rows of patches and of their columns.
    norm_epsilon: ε of RMSNorm.
    mean: mean of red, green and blue in 0 … 1, which is subtracted.
    std: their standard deviation.
  """

  D: int
  L: int
  H: int
  F: int
  token: int
  full_layers: tuple[int, ...] = (7, 15, 23, 31)
  window: int = 8
  patch_size: int = 14
  frames: int = 2
  merge: int = 2
  rope: rope_lib.RopeConfig = rope_lib.RopeConfig(theta=1e4)
  norm_epsilon: float = 1e-6
  mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
  std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

  def __post_init__(self):
    if self.D % self.H or self.D // self.H % 4:
      raise ValueError(
        f'A vision tower {self.D} wide has {self.H} heads, and the width of a '
        'head must be a multiple of four: half of it turns by the row of a '
        'patch, half by its column.'
      )
    if self.window % self.merge:
      raise ValueError(
        f'Windows of {self.window} patches cannot be cut into squares of '
        f'{self.merge} evenly: give a multiple.'
      )
    if any(not 0 <= i < self.L for i in self.full_layers):
      raise ValueError(
        f'Layers {self.full_layers} attend to whole pictures, and the tower '
        f'has layers 0 to {self.L - 1}.'
      )


@dataclasses.dataclass(frozen=True)
class Config:
  """Dimensions and settings of a model; letters as in `stages/base.py`.

  Attributes:
    V: vocabulary size.
    D: model width.
    L: number of layers.
    H: number of query heads.
    K: number of key-value heads; each serves H / K query heads.
    W: width of a head.
    F: width of the feed-forward.
      With experts, that of each.
    E: number of experts of each layer's feed-forward; 0 for a dense one.
    experts_per_token: number of experts that each token uses.
    normalize_experts: whether the weights of a token's experts add up to one.
    rope: rotary position embedding.
    max_positions: tokens of a prompt and its completion together that the model
      was made for; None where that is not known.
    norm_epsilon: ε of RMSNorm.
    qkv_bias: whether query, key and value have biases.
    out_bias: whether the output of attention has a bias.
    feedforward_bias: whether the three matrices of a dense feed-forward have
      biases.
    qk_norm: RMSNorm of each head's query and key, before they are rotated.
    activation: of the gate of the feed-forward.
    unit_offset: scales of norms are stored as their difference from one.
    post_norms: also RMSNorm of the outputs of attention and feed-forward.
    scale_embeddings: multiply embeddings by √D.
    query_scale: factor of attention scores; 1/√W if None.
    score_softcap: attention scores s become c · tanh(s / c); None to leave
      them.
    logit_softcap: the same for logits.
    windows: for each layer, the number of latest tokens that it attends to,
      itself included; None for a layer that attends to all. All windows are
      equal. Empty if no layer has one.
    local_rope: rotary embedding of layers with a window; `rope` if None.
    tie_embeddings: whether the output layer is the embedding.
    dtype: type of the arithmetic, one of `DTYPES`. Parameters are stored in
      float32 or wider: in bfloat16, updates below 1/256 of a weight would be
      rounded away.
    remat: activations stored for the backward pass: 'none' to store all, or
      the name of a policy in `jax.checkpoint_policies`, such as
      'nothing_saveable'; 'auto' for that of the plan, and all without one.
    max_live_scores: maximum number of attention scores on a device at once, as
      in `attention.attention`.
    attention: 'auto' for the kernel of the hardware where it can compute the
      model's masks, and chunks of queries elsewhere; 'splash', 'cudnn' or
      'chunked' for one of them on any hardware.
    init_stddev: standard deviation of random weights.
    vision: the tower through which the model reads pictures; None if it reads
      text alone.
  """

  V: int
  D: int
  L: int
  H: int
  K: int
  W: int
  F: int
  E: int = 0
  experts_per_token: int = 0
  normalize_experts: bool = True
  rope: rope_lib.RopeConfig = rope_lib.RopeConfig()
  max_positions: int | None = None
  norm_epsilon: float = 1e-6
  qkv_bias: bool = True
  out_bias: bool = False
  feedforward_bias: bool = False
  qk_norm: bool = False
  activation: Activation = 'silu'
  unit_offset: bool = False
  post_norms: bool = False
  scale_embeddings: bool = False
  query_scale: float | None = None
  score_softcap: float | None = None
  logit_softcap: float | None = None
  windows: tuple[int | None, ...] = ()
  local_rope: rope_lib.RopeConfig | None = None
  tie_embeddings: bool = True
  dtype: str = 'float32'
  remat: str = remat_lib.AUTO
  max_live_scores: int = attention.MAX_LIVE_SCORES
  attention: str = kernels.AUTO
  init_stddev: float = 0.02
  vision: VisionConfig | None = None

  @property
  def param_dtype(self):
    """The type that parameters are stored in."""
    return mixed_precision.wide_dtype(jnp.dtype(self.dtype))

  @property
  def window(self) -> int | None:
    """Tokens that layers with a window attend to; None without such layers."""
    return next((w for w in self.windows if w is not None), None)

  def is_local(self, layer: int) -> bool:
    """Whether a layer has a window."""
    return bool(self.windows) and self.windows[layer] is not None

  def __post_init__(self):
    if self.H % self.K:
      raise ValueError(
        f'{self.H} query heads cannot share {self.K} key-value heads evenly.'
      )
    check_dtype(self.dtype)
    kernels.check(self.attention)
    if self.remat != remat_lib.AUTO:
      remat_lib.check(self.remat)
    if self.activation not in typing.get_args(Activation):
      raise ValueError(
        f'Activation {self.activation!r} is not one of '
        f'{typing.get_args(Activation)}.'
      )
    if self.E and not 0 < self.experts_per_token <= self.E:
      raise ValueError(
        f'A token cannot use {self.experts_per_token} of {self.E} experts.'
      )
    if self.windows and len(self.windows) != self.L:
      raise ValueError(
        f'{len(self.windows)} windows are given for {self.L} layers: give one '
        'a layer, or none.'
      )
    if len({w for w in self.windows if w is not None}) > 1:
      raise ValueError(
        f'Layers have different windows {self.windows}: one size is supported.'
      )
    if self.rope.sections and sum(self.rope.sections) != self.W // 2:
      raise ValueError(
        f'The sections {self.rope.sections} of the rotary embedding have '
        f'{sum(self.rope.sections)} planes, and a head of width {self.W} has '
        f'{self.W // 2}.'
      )
    if self.vision is not None and (self.window or not self.rope.sections):
      raise ValueError(
        'A model that reads pictures needs a rotary embedding with sections, '
        'for time, row and column, and no layer of it can have a window.'
      )
