"""A decoder-only transformer of the Qwen2 family.

Grouped-query attention with biases, rotary positions, RMSNorm and a gated
feed-forward. The completions of a group share their prompt, so a sequence is
processed in two parts: the prompt once a group, then each completion, which
attends to the keys of its prompt and to its own. Training and generation do
this in the same way.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from sharding import row_map, rules
from stages.models import mixed_precision
from stages.models import rope as rope_lib


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
    rope: rotary position embedding.
    norm_epsilon: ε of RMSNorm.
    qkv_bias: whether query, key and value have biases.
    tie_embeddings: whether the output layer is the embedding.
    dtype: type of the arithmetic. Parameters are stored in float32 or wider:
      in bfloat16, updates below 1/256 of a weight would be rounded away.
    remat: activations stored for the backward pass: 'none' to store all, or
      the name of a policy in `jax.checkpoint_policies`, such as
      'nothing_saveable'.
    init_stddev: standard deviation of random weights.
  """

  V: int
  D: int
  L: int
  H: int
  K: int
  W: int
  F: int
  rope: rope_lib.RopeConfig = rope_lib.RopeConfig()
  norm_epsilon: float = 1e-6
  qkv_bias: bool = True
  tie_embeddings: bool = True
  dtype: str = 'float32'
  remat: str = 'none'
  init_stddev: float = 0.02

  @property
  def param_dtype(self):
    """The type that parameters are stored in."""
    return mixed_precision.wide_dtype(jnp.dtype(self.dtype))

  def __post_init__(self):
    if self.H % self.K:
      raise ValueError(
        f'{self.H} query heads cannot share {self.K} key-value heads evenly.'
      )
    if self.remat != 'none' and not hasattr(
      jax.checkpoint_policies, self.remat
    ):
      raise ValueError(
        f"remat {self.remat!r} is neither 'none' nor a policy of "
        'jax.checkpoint_policies.'
      )


class PromptCache(NamedTuple):
  """Keys and values of prompts, stacked over layers, one row a group.

  Attributes:
    key: rotated keys, [L, N, P, K, W].
    value: values, [L, N, P, K, W].
  """

  key: Array
  value: Array


def attention(q_BTHW, k_BCKW, v_BCKW, mask_BTC):
  """Attention where `mask_BTC` is true, with a softmax in float32 or wider."""
  if q_BTHW.dtype != jnp.float64:
    return jax.nn.dot_product_attention(
      q_BTHW, k_BCKW, v_BCKW, mask=mask_BTC[:, None]
    )
  # The library computes every softmax in float32, an error of 1e-6 in float64.
  B, T, H, W = q_BTHW.shape
  K = k_BCKW.shape[2]
  q_BTKJW = q_BTHW.reshape(B, T, K, H // K, W)
  score_BKJTC = jnp.einsum('BTKJW,BCKW->BKJTC', q_BTKJW, k_BCKW) * W**-0.5
  score_BKJTC = jnp.where(mask_BTC[:, None, None], score_BKJTC, -1e300)
  weight_BKJTC = jax.nn.softmax(score_BKJTC, axis=-1)
  seen_BTKJW = jnp.einsum('BKJTC,BCKW->BTKJW', weight_BKJTC, v_BCKW)
  return seen_BTKJW.reshape(B, T, H, W)


def _parameter(module, name, *shape):
  """A parameter in the dtype that it is stored in.

  Its gradient is summed in that dtype. A cast before use would sum the
  gradients of all tokens in the narrow dtype.
  """
  # `init_params` draws the values; flax only declares names and shapes.
  zeros = nn.initializers.zeros
  return module.param(name, zeros, shape, module.config.param_dtype)


def _matrix(module, name, *shape):
  """A factor of matrix products, in `module.config.dtype`.

  Products sum over tokens in float32, and round the gradient once.
  """
  return _parameter(module, name, *shape).astype(module.config.dtype)


class Block(nn.Module):
  """One transformer layer."""

  config: Config

  def setup(self):
    c = self.config
    matrix = functools.partial(_matrix, self)
    parameter = functools.partial(_parameter, self)
    self.query_DHW = matrix('query_DHW', c.D, c.H, c.W)
    self.key_DKW = matrix('key_DKW', c.D, c.K, c.W)
    self.value_DKW = matrix('value_DKW', c.D, c.K, c.W)
    self.out_HWD = matrix('out_HWD', c.H, c.W, c.D)
    self.gate_DF = matrix('gate_DF', c.D, c.F)
    self.up_DF = matrix('up_DF', c.D, c.F)
    self.down_FD = matrix('down_FD', c.F, c.D)
    self.before_D = parameter('before_attention_D', c.D)
    self.after_D = parameter('before_feedforward_D', c.D)
    if c.qkv_bias:
      self.query_HW = parameter('query_bias_HW', c.H, c.W)
      self.key_KW = parameter('key_bias_KW', c.K, c.W)
      self.value_KW = parameter('value_bias_KW', c.K, c.W)

  def project(self, x_BTD, cos_BTR, sin_BTR):
    """Rotated queries and keys, and values."""
    x_BTD = mixed_precision.rms_norm(
      rules.shard_rows(x_BTD), self.before_D, self.config.norm_epsilon
    )
    # In float32 until biases are added and positions are rotated.
    q_BTHW = mixed_precision.product('BTD,DHW->BTHW', x_BTD, self.query_DHW)
    k_BTKW = mixed_precision.product('BTD,DKW->BTKW', x_BTD, self.key_DKW)
    v_BTKW = mixed_precision.product('BTD,DKW->BTKW', x_BTD, self.value_DKW)
    if self.config.qkv_bias:
      q_BTHW += self.query_HW[None, None]
      k_BTKW += self.key_KW[None, None]
      v_BTKW += self.value_KW[None, None]
    q_BTHW = rope_lib.rotate(q_BTHW, cos_BTR, sin_BTR)
    k_BTKW = rope_lib.rotate(k_BTKW, cos_BTR, sin_BTR)
    dtype = x_BTD.dtype
    return q_BTHW.astype(dtype), k_BTKW.astype(dtype), v_BTKW.astype(dtype)

  def finish(self, x_BTD, seen_BTHW):
    """Adds the output of attention, then that of the feed-forward."""
    x_BTD += jnp.einsum('BTHW,HWD->BTD', seen_BTHW, self.out_HWD)
    x_BTD = rules.shard_rows(x_BTD)
    y_BTD = mixed_precision.rms_norm(
      x_BTD, self.after_D, self.config.norm_epsilon
    )
    gate_BTF = jnp.einsum('BTD,DF->BTF', y_BTD, self.gate_DF)
    up_BTF = jnp.einsum('BTD,DF->BTF', y_BTD, self.up_DF)
    hidden_BTF = nn.silu(gate_BTF) * up_BTF
    x_BTD += jnp.einsum('BTF,FD->BTD', hidden_BTF, self.down_FD)
    return rules.shard_rows(x_BTD)

  def __call__(self, x_NSD, cos_NSR, sin_NSR, mask_NPP, mask_BTC):
    """Processes each group: its prompt, then its completions end to end.

    Args:
      x_NSD: activations; S is P + group_size · T.
      cos_NSR: cosine of the angle of every position.
      sin_NSR: sine of it.
      mask_NPP: where prompts attend to themselves.
      mask_BTC: where completions attend: to their prompt, then to themselves;
        None without completions.

    Returns:
      Activations, and the prompts' keys and values.
    """
    N, P, _ = mask_NPP.shape
    q_NSHW, k_NSKW, v_NSKW = self.project(x_NSD, cos_NSR, sin_NSR)
    k_NPKW, v_NPKW = k_NSKW[:, :P], v_NSKW[:, :P]
    seen_NSHW = attention(q_NSHW[:, :P], k_NPKW, v_NPKW, mask_NPP)
    if mask_BTC is not None:
      B, T, _ = mask_BTC.shape

      def completions(x):
        return x[:, P:].reshape(B, T, *x.shape[2:])

      def context(prompt, x):
        prompt = jnp.repeat(prompt, B // N, axis=0)
        return jnp.concatenate([prompt, completions(x)], axis=1)

      own_BTHW = attention(
        completions(q_NSHW),
        context(k_NPKW, k_NSKW),
        context(v_NPKW, v_NSKW),
        mask_BTC,
      )
      own = own_BTHW.reshape(N, -1, *own_BTHW.shape[2:])
      seen_NSHW = jnp.concatenate([seen_NSHW, own], axis=1)
    return self.finish(x_NSD, seen_NSHW), (k_NPKW, v_NPKW)


class Transformer(nn.Module):
  """The model: embedding, scanned layers, final norm and output layer."""

  config: Config

  def setup(self):
    c = self.config
    self.embed_VD = _parameter(self, 'embed_VD', c.V, c.D)
    self.norm_D = _parameter(self, 'norm_D', c.D)
    if not c.tie_embeddings:
      self.unembed_DV = _parameter(self, 'unembed_DV', c.D, c.V)
    block = Block
    if c.remat != 'none':
      policy = getattr(jax.checkpoint_policies, c.remat)
      block = nn.remat(Block, policy=policy, prevent_cse=False)
    self.layers = nn.scan(
      block,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      in_axes=(nn.broadcast,) * 4,
      length=c.L,
    )(c)

  def embed(self, token_BT):
    return self._look_up(self.embed_VD, token_BT)

  def logits(self, x_BTD):
    """As `output_logits`."""
    params = {x: getattr(self, x) for x in output_names(self.config)}
    return output_logits(self.config, params, x_BTD)

  def prefill(self, token_NP, mask_NP) -> PromptCache:
    """Keys and values of prompts, padded anywhere."""
    _, (key, value) = self._prompts(token_NP, mask_NP)
    return PromptCache(key, value)

  def hidden_states(self, token_NP, mask_NP, token_BT, start_B):
    """Final hidden states [B, T, D] of completions.

    Args:
      token_NP: prompts, one a group, padded anywhere.
      mask_NP: one where completions may attend.
      token_BT: completions; the rows of a group are adjacent.
      start_B: position of the first token of each.
    """
    (N, P), (B, T) = token_NP.shape, token_BT.shape
    position_BT = start_B[:, None] + jnp.arange(T)[None]
    mask_BTP = jnp.repeat(mask_NP[:, None] > 0, B // N, axis=0)
    mask_BTP = jnp.broadcast_to(mask_BTP, (B, T, P))
    mask_BTT = jnp.broadcast_to(jnp.tri(T, dtype=bool)[None], (B, T, T))
    mask_BTC = jnp.concatenate([mask_BTP, mask_BTT], axis=-1)

    def pack(x_NP, x_BT):
      return jnp.concatenate([x_NP, x_BT.reshape(N, -1)], axis=1)

    position_NS = pack(positions(mask_NP), position_BT)
    x_NSD = row_map.map_rows(
      lambda params, token_NS: self._look_up(params['embed_VD'], token_NS),
      {'embed_VD': self.embed_VD},
      pack(token_NP, token_BT),
      dtype=self.config.dtype,
    )
    x_NSD, _ = self._stack(x_NSD, position_NS, _causal(mask_NP), mask_BTC)
    return x_NSD[:, P:].reshape(B, T, -1)

  def _look_up(self, embed_VD, token_BT):
    # Padding may hold any id; one out of range would give NaN.
    x_BTD = jnp.take(embed_VD, token_BT, axis=0, mode='clip')
    return x_BTD.astype(self.config.dtype)

  def _stack(self, x_NSD, position_NS, mask_NPP, mask_BTC):
    angles = rope_lib.angles(self.config.rope, self.config.W, position_NS)
    return self.layers(x_NSD, *angles, mask_NPP, mask_BTC)

  def _prompts(self, token_NP, mask_NP):
    return self._stack(
      self.embed(token_NP), positions(mask_NP), _causal(mask_NP), None
    )

  def __call__(self, token_NP, mask_NP):
    """Logits after every token of padded sequences: the plain forward pass."""
    return self.logits(self._prompts(token_NP, mask_NP)[0])


def output_names(config: Config) -> tuple[str, str]:
  """Names of the parameters of the final norm and of the output layer."""
  return 'norm_D', 'embed_VD' if config.tie_embeddings else 'unembed_DV'


def output_logits(config: Config, params, x_BTD):
  """Logits of the next token from final hidden states, in float32 or wider.

  Args:
    config: dimensions of the model.
    params: those of `output_names`, by name.
    x_BTD: final hidden states.
  """
  x_BTD = mixed_precision.rms_norm(x_BTD, params['norm_D'], config.norm_epsilon)
  if config.tie_embeddings:
    return mixed_precision.product('BTD,VD->BTV', x_BTD, params['embed_VD'])
  return mixed_precision.product('BTD,DV->BTV', x_BTD, params['unembed_DV'])


def positions(mask_NP):
  """Positions of tokens, without padding."""
  return jnp.cumsum(mask_NP, axis=1, dtype=jnp.int32) - 1


def _causal(mask_NP):
  """Causal mask [N, P, P] of padded prompts: earlier and real tokens only."""
  P = mask_NP.shape[1]
  return jnp.tri(P, dtype=bool)[None] & (mask_NP[:, None] > 0)


def layer_params(params: Any, i: int) -> Any:
  """Parameters of layer `i`."""
  return jax.tree.map(lambda x: x[i], params['layers'])


def compute_params(config: Config, params: Any) -> Any:
  """Parameters rounded once, for a call that reads each of them many times.

  Biases and norm scales are used in the dtype that they are stored in, so they
  stay in it. The result of the model is the same as with `params`.
  """

  def rounded(path, leaf):
    return leaf if _is_vector(path) else leaf.astype(config.dtype)

  return jax.tree_util.tree_map_with_path(rounded, params)


def _is_vector(path) -> bool:
  """Whether the path leads to a bias or a norm scale."""
  name = path[-1].key
  return 'bias' in name or name.endswith('_D')


def param_shapes(config: Config) -> Any:
  """Shapes and types of the parameters of a model."""
  token_11 = jnp.zeros((1, 1), jnp.int32)
  model = Transformer(config)
  variables = jax.eval_shape(model.init, jax.random.key(0), token_11, token_11)
  return variables['params']


def init_params(config: Config, key: jax.Array) -> Any:
  """Random parameters: normal matrices, norms of one, biases of zero.

  One draw serves all matrices: compiling one for each takes seconds.
  """
  shapes = param_shapes(config)

  @jax.jit
  def draw(key):
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    ends = np.cumsum([leaf.size for _, leaf in leaves])
    noise = (
      jax.random.normal(key, ends[-1:], config.param_dtype) * config.init_stddev
    )
    params = []
    for (path, leaf), part in zip(
      leaves, jnp.split(noise, ends[:-1]), strict=True
    ):
      if _is_vector(path):
        fill = 0.0 if 'bias' in path[-1].key else 1.0
        params.append(jnp.full(leaf.shape, fill, leaf.dtype))
      else:
        params.append(part.reshape(leaf.shape))
    return jax.tree.unflatten(tree, params)

  return draw(key)
