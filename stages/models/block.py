"""A layer of a transformer: attention and a gated feed-forward."""

import functools

from flax import errors
from flax import linen as nn
import jax
import jax.numpy as jnp

from sharding import rules
from stages.models import config as config_lib
from stages.models import lora, quantization
from stages.models.layers import attention, mixed_precision, mixture
from stages.models.layers import rope as rope_lib

Config = config_lib.Config

ACTIVATIONS = {
  'silu': nn.silu,
  'gelu_tanh': mixed_precision.gelu_tanh,
}


def parameter(module, name, *shape):
  """A parameter in the dtype that it is stored in.

  Its gradient is summed in that dtype. A cast before use would sum the
  gradients of all tokens in the narrow dtype.
  """
  if not module.has_variable('params', name):
    # `transformer.init_params` draws the values; flax declares the shapes.
    zeros = nn.initializers.zeros
    return module.param(name, zeros, shape, module.config.param_dtype)
  # `module.param` would trace `zeros` for its shape, a quarter of all tracing.
  value = module.get_variable('params', name)
  if value.shape != shape:
    raise errors.ScopeParamShapeError(
      name, module.scope.path_text, value.shape, shape
    )
  return value


def matrix(module, name, *shape):
  """A factor of matrix products, in `module.config.dtype`.

  Products sum over tokens in float32, and round the gradient once. None for one
  that is quantized, which `lora.linear` expands.
  """
  if module.has_variable('params', quantization.scale_name(name)):
    return None
  return parameter(module, name, *shape).astype(module.config.dtype)


def rms_norm(config: Config, x, scale):
  """RMSNorm over the last dimension, with the scale as `config` stores it."""
  if config.unit_offset:
    scale = 1 + scale
  return mixed_precision.rms_norm(x, scale, config.norm_epsilon)


class Block(nn.Module):
  """One transformer layer."""

  config: Config

  def setup(self):
    c = self.config
    one_matrix = functools.partial(matrix, self)
    one_parameter = functools.partial(parameter, self)
    self.query_DHW = one_matrix('query_DHW', c.D, c.H, c.W)
    self.key_DKW = one_matrix('key_DKW', c.D, c.K, c.W)
    self.value_DKW = one_matrix('value_DKW', c.D, c.K, c.W)
    self.out_HWD = one_matrix('out_HWD', c.H, c.W, c.D)
    if c.E:
      self.router_DE = one_parameter('router_DE', c.D, c.E)
      self.gate_EDF = one_matrix('gate_EDF', c.E, c.D, c.F)
      self.up_EDF = one_matrix('up_EDF', c.E, c.D, c.F)
      self.down_EFD = one_matrix('down_EFD', c.E, c.F, c.D)
    else:
      self.gate_DF = one_matrix('gate_DF', c.D, c.F)
      self.up_DF = one_matrix('up_DF', c.D, c.F)
      self.down_FD = one_matrix('down_FD', c.F, c.D)
    if c.feedforward_bias:
      self.gate_F = one_parameter('gate_bias_F', c.F)
      self.up_F = one_parameter('up_bias_F', c.F)
      self.down_D = one_parameter('down_bias_D', c.D)
    self.declare_norms()
    if c.qkv_bias:
      self.query_HW = one_parameter('query_bias_HW', c.H, c.W)
      self.key_KW = one_parameter('key_bias_KW', c.K, c.W)
      self.value_KW = one_parameter('value_bias_KW', c.K, c.W)
    if c.out_bias:
      self.out_D = one_parameter('out_bias_D', c.D)
    if c.qk_norm:
      self.query_W = one_parameter('query_norm_W', c.W)
      self.key_W = one_parameter('key_norm_W', c.W)
    if c.post_norms:
      self.after_attention_D = one_parameter('after_attention_D', c.D)
      self.after_feedforward_D = one_parameter('after_feedforward_D', c.D)

  def declare_norms(self):
    """Makes the parameters of the norms before attention and feed-forward."""
    D = self.config.D
    self.before_attention_D = parameter(self, 'before_attention_D', D)
    self.before_feedforward_D = parameter(self, 'before_feedforward_D', D)

  def normalize(self, name: str, x_BTD, condition):
    """The norm `name`; `condition` is None unless a subclass reads it."""
    del condition
    return rms_norm(self.config, x_BTD, getattr(self, f'{name}_D'))

  def add(self, name: str, x_BTD, y_BTD, condition):
    """Adds the output `y_BTD` of what follows the norm `name` to its input."""
    del name, condition
    return x_BTD + y_BTD

  def project(self, x_BTD, cos_BTR, sin_BTR, condition=None):
    """Rotated queries and keys, and values."""
    x_BTD = rules.shard(x_BTD, rules.DIVIDED)
    x_BTD = self.normalize('before_attention', x_BTD, condition)
    x_BTD = rules.gather_sequence(x_BTD)
    # In float32 until biases are added and positions are rotated.
    wide = mixed_precision.product
    q_BTHW = lora.linear(self, 'query_DHW', 'BTD,DHW->BTHW', x_BTD, wide)
    k_BTKW = lora.linear(self, 'key_DKW', 'BTD,DKW->BTKW', x_BTD, wide)
    v_BTKW = lora.linear(self, 'value_DKW', 'BTD,DKW->BTKW', x_BTD, wide)
    q_BTHW = rules.shard(q_BTHW, (*rules.WHOLE, 'H'))
    k_BTKW = rules.shard(k_BTKW, (*rules.WHOLE, 'K'))
    v_BTKW = rules.shard(v_BTKW, (*rules.WHOLE, 'K'))
    if self.config.qkv_bias:
      q_BTHW += self.query_HW[None, None]
      k_BTKW += self.key_KW[None, None]
      v_BTKW += self.value_KW[None, None]
    dtype = x_BTD.dtype
    if self.config.qk_norm:
      # Rounded first: the backward pass would keep float32 queries otherwise.
      q_BTHW = rms_norm(self.config, q_BTHW.astype(dtype), self.query_W)
      k_BTKW = rms_norm(self.config, k_BTKW.astype(dtype), self.key_W)
    q_BTHW = rope_lib.rotate(q_BTHW, cos_BTR, sin_BTR)
    k_BTKW = rope_lib.rotate(k_BTKW, cos_BTR, sin_BTR)
    return q_BTHW.astype(dtype), k_BTKW.astype(dtype), v_BTKW.astype(dtype)

  def finish(self, x_BTD, seen_BTHW, condition=None):
    """Adds the output of attention, then that of the feed-forward."""
    c = self.config
    seen_BTHW = rules.shard(seen_BTHW, (*rules.WHOLE, 'H'))
    y_BTD = lora.linear(self, 'out_HWD', 'BTHW,HWD->BTD', seen_BTHW)
    y_BTD = rules.scatter_sequence(y_BTD)
    if c.out_bias:
      wide = mixed_precision.wide_dtype(y_BTD.dtype)
      y_BTD = (y_BTD.astype(wide) + self.out_D[None, None]).astype(y_BTD.dtype)
    if c.post_norms:
      y_BTD = rms_norm(c, y_BTD, self.after_attention_D)
    x_BTD = self.add('before_attention', x_BTD, y_BTD, condition)
    x_BTD = rules.shard(x_BTD, rules.DIVIDED)
    y_BTD = self.normalize('before_feedforward', x_BTD, condition)
    y_BTD = self.feedforward(rules.gather_sequence(y_BTD))
    y_BTD = rules.scatter_sequence(y_BTD)
    if c.post_norms:
      y_BTD = rms_norm(c, y_BTD, self.after_feedforward_D)
    x_BTD = self.add('before_feedforward', x_BTD, y_BTD, condition)
    return rules.shard(x_BTD, rules.DIVIDED)

  def feedforward(self, x_BTD):
    c = self.config
    activation = ACTIVATIONS[c.activation]
    if c.E:
      logit_BTE = mixture.router_logits(x_BTD, self.router_DE)
      expert, name = None, mixture.REPLAYED
      if self.has_variable(name, name):
        expert = self.get_variable(name, name)
      weight, routing = mixture.route(
        logit_BTE, c.experts_per_token, c.normalize_experts, expert
      )
      if self.is_mutable_collection(mixture.ROUTING):
        self.put_variable(mixture.ROUTING, mixture.ROUTING, routing)
      return mixture.feedforward(
        x_BTD,
        weight,
        routing.expert,
        (self.gate_EDF, self.up_EDF, self.down_EFD),
        activation,
      )
    gate_BTF = self._affine('gate', 'DF', x_BTD)
    hidden_BTF = activation(gate_BTF) * self._affine('up', 'DF', x_BTD)
    return self._affine('down', 'FD', hidden_BTF)

  def _affine(self, name: str, letters: str, x):
    """W x, plus b if the feed-forward has biases; the sum is rounded once."""
    equation = f'BT{letters[0]},{letters}->BT{letters[1]}'
    if not self.config.feedforward_bias:
      return lora.linear(self, f'{name}_{letters}', equation, x)
    y = lora.linear(
      self, f'{name}_{letters}', equation, x, mixed_precision.product
    )
    bias = getattr(self, f'{name}_{letters[1]}')
    return (y + bias[None, None]).astype(x.dtype)

  def __call__(self, x_NSD, is_local, everywhere, nearby):
    """Processes each group: its prompt, then its completions end to end.

    Args:
      x_NSD: activations; S is P + group_size · T.
      is_local: whether this layer has a window; None if no layer has one.
      everywhere: positions and masks of layers without a window.
      nearby: those of layers with a window; None if no layer has one.

    Returns:
      Activations, and the prompts' keys and values.
    """
    context = everywhere
    if is_local is not None:
      context = jax.tree.map(
        lambda near, far: jnp.where(is_local, near, far), nearby, everywhere
      )
    N, P = context.prompt.key_BC.shape
    attend = functools.partial(
      attention.attention,
      scale=self.config.query_scale,
      softcap=self.config.score_softcap,
      implementation=self.config.attention,
      max_live_scores=self.config.max_live_scores,
    )
    q_NSHW, k_NSKW, v_NSKW = self.project(
      x_NSD, context.cos_NSR, context.sin_NSR
    )
    k_NPKW, v_NPKW = k_NSKW[:, :P], v_NSKW[:, :P]
    seen_NSHW = attend(q_NSHW[:, :P], k_NPKW, v_NPKW, context.prompt)
    if context.completion is not None:
      B, C = context.completion.key_BC.shape
      T = C - P

      def completions(x):
        return x[:, P:].reshape(B, T, *x.shape[2:])

      def joined(prompt, x):
        prompt = jnp.repeat(prompt, B // N, axis=0)
        return jnp.concatenate([prompt, completions(x)], axis=1)

      own_BTHW = attend(
        completions(q_NSHW),
        joined(k_NPKW, k_NSKW),
        joined(v_NPKW, v_NSKW),
        context.completion,
      )
      own = own_BTHW.reshape(N, -1, *own_BTHW.shape[2:])
      seen_NSHW = jnp.concatenate([seen_NSHW, own], axis=1)
    return self.finish(x_NSD, seen_NSHW), (k_NPKW, v_NPKW)
