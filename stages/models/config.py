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
    norm_epsilon: ε of RMSNorm.
    qkv_bias: whether query, key and value have biases.
    out_bias: whether the output of attention has a bias.
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
    dtype: type of the arithmetic. Parameters are stored in float32 or wider:
      in bfloat16, updates below 1/256 of a weight would be rounded away.
    remat: activations stored for the backward pass: 'none' to store all, or
      the name of a policy in `jax.checkpoint_policies`, such as
      'nothing_saveable'; 'auto' for that of the plan, and all without one.
    max_live_scores: maximum number of attention scores on a device at once, as
      in `attention.attention`.
    attention: 'auto' for the kernel of the hardware where it can compute the
      model's masks, and chunks of queries elsewhere; 'splash', 'cudnn' or
      'chunked' for one of them on any hardware.
    init_stddev: standard deviation of random weights.
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
  norm_epsilon: float = 1e-6
  qkv_bias: bool = True
  out_bias: bool = False
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
