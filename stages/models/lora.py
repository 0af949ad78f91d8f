"""Low-rank adapters beside frozen weights, LoRA, arXiv:2106.09685.

  y = W x + (α/r) B A x

W is frozen. A and B are trained, and B starts at zero, so that training starts
from the model itself. The formula has the paper's order; in the code, x is
multiplied from the right, as x A B, with A [inputs, r] and B [r, outputs]. The
parameters of an adapted policy are a dict:

  'adapter': A and B of each matrix, stacked over layers
  base.FROZEN: {'params': the parameters of the model, 'alpha': α}
  base.CRITIC: the parameters of a critic, trained in full, where there is one

Training and scoring compute (α/r) B (A x) beside W x, and never the sum
W + (α/r) B A. Sampling computes this sum once for each call, because otherwise
each token would read A and B.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from stages import base, ranges
from stages.models import quantization
from stages.models.files import decoder_names
from stages.models.layers import mixed_precision

ADAPTER, PARAMS, ALPHA = 'adapter', 'params', 'alpha'
# The matrix that each letter of `Lora.targets` stands for. Targets may also be
# named as in a checkpoint, such as q_proj.
LETTERS = {
  'q': 'query_DHW',
  'k': 'key_DKW',
  'v': 'value_DKW',
  'o': 'out_HWD',
  'g': 'gate_DF',
  'u': 'up_DF',
  'd': 'down_FD',
}
ALL = ''.join(LETTERS)
DEFAULT_ALPHA = 32


def module_name(parameter: str) -> str:
  """The name of a linear map in a checkpoint, such as 'self_attn.q_proj'."""
  name = decoder_names.NAMES[parameter].name.removesuffix('.weight')
  return name.removeprefix(f'{decoder_names.LAYER}.')


NAMED = {module_name(p).split('.')[-1]: p for p in LETTERS.values()}


@dataclasses.dataclass(frozen=True)
class Lora:
  """Settings of adapters.

  Attributes:
    rank: r; None or 0 trains all weights, unless `adapter` is given.
    alpha: α; if None, that of `adapter`, or 32 without one.
    targets: the matrices to adapt: letters (q k v o of attention, g u d for
      gate, up and down of the feed-forward), or a list of names such as
      'q_proj'; if None, those of `adapter`, or all seven without one.
    adapter: folder of an adapter in PEFT's format to start from; None starts
      from the model itself.
    quantize: 'int8' or 'nf4' to hold the frozen matrices of layers in eight or
      four bits, see `quantization`; None to leave them as they are.
  """

  rank: ranges.PositiveInt | None = None
  alpha: ranges.PositiveFloat | None = None
  targets: str | tuple[str, ...] | None = None
  adapter: str | None = None
  quantize: quantization.Kind | None = None

  def __post_init__(self):
    if self.rank and (self.rank < 0 or self.rank != int(self.rank)):
      raise ValueError(
        f'The rank of LoRA is {self.rank}: give a whole number such as 32, or '
        '0 or None to train all weights.'
      )
    parameters(ALL if self.targets is None else self.targets)
    if self:
      quantization.check(self.quantize)

  def __bool__(self):
    return bool(self.rank or self.adapter)


def parameters(targets: str | tuple[str, ...]) -> tuple[str, ...]:
  """Names of the parameters that targets select, in a fixed order.

  Raises:
    ValueError: if no target is given, or one is unknown.
  """
  known = LETTERS | NAMED
  if isinstance(targets, str):
    targets = [targets] if targets in NAMED else list(targets)
  unknown = [x for x in targets if x not in known]
  if unknown or not targets:
    said = ', '.join(map(repr, unknown)) or 'none'
    raise ValueError(
      f'Targets of LoRA are letters of {ALL!r} or names of '
      f'{", ".join(NAMED)}; {said} was given.'
    )
  chosen = {known[x] for x in targets}
  return tuple(p for p in LETTERS.values() if p in chosen)


def split(parameter: str) -> tuple[str, str]:
  """The dimension letters of a matrix's inputs, and those of its outputs."""
  letters = parameter.rsplit('_', 1)[1]
  n = decoder_names.NAMES[parameter].inputs
  return letters[:n], letters[n:]


# Index of the last input dimension of each matrix of one layer.
AXES = {p: len(split(p)[0]) - 1 for p in LETTERS.values()}


def pair_names(parameter: str) -> tuple[str, str]:
  """The names of A and B of a matrix: `query_A_DI` and `query_B_IHW`."""
  stem, (ins, outs) = parameter.rsplit('_', 1)[0], split(parameter)
  return f'{stem}_A_{ins}I', f'{stem}_B_I{outs}'


def linear(module, parameter: str, equation: str, x, product=jnp.einsum):
  """Computes W x, plus (α/r) B A x where `join` has put an adapter beside W.

  The result is [B, T, outputs], in the dtype that `product` returns.

  Args:
    module: a flax module with the matrix as an attribute.
    parameter: name of the matrix.
    equation: einsum equation of W x, with x first.
    x: the input, [B, T, inputs].
    product: computes W x from the equation, x and W, as `jnp.einsum` does.
  """
  scales = quantization.scale_name(parameter)
  if module.has_variable('params', scales):
    frozen = (module.get_variable('params', n) for n in (parameter, scales))
    y = quantization.product(product, equation, x, *frozen, AXES[parameter])
  else:
    y = product(equation, x, getattr(module, parameter))
  names = pair_names(parameter)
  if not module.has_variable('params', names[0]):
    return y
  a, b = (module.get_variable('params', name) for name in names)
  ins, outs = split(parameter)
  low_BTI = mixed_precision.rounded_product(f'BT{ins},{ins}I->BTI', x, a)
  # In the dtype of W x: otherwise the sum would take both to float32.
  is_wide = y.dtype == mixed_precision.wide_dtype(x.dtype)
  multiply = (
    mixed_precision.product if is_wide else mixed_precision.rounded_product
  )
  return y + multiply(f'BTI,I{outs}->BT{outs}', low_BTI, b)


def shapes(params, settings: Lora) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes of A [L, inputs, r] and B [L, r, outputs], by name.

  Args:
    params: the parameters of a model, without adapters.
    settings: targets and rank.

  Raises:
    ValueError: if the model lacks a target.
  """
  layers = params.get('layers', {})
  targets = parameters(ALL if settings.targets is None else settings.targets)
  absent = [p for p in targets if p not in layers]
  if absent:
    names = ', '.join(module_name(p).split('.')[-1] for p in absent)
    raise ValueError(
      f'LoRA cannot adapt {names}: this model has no such matrices, as in a '
      "mixture of experts. Choose other targets, such as 'qkvo'."
    )
  found = {}
  for p in targets:
    shape, dtype = layers[p].shape, layers[p].dtype
    n = 1 + len(split(p)[0])
    a, b = pair_names(p)
    # In bfloat16, small updates would be rounded away.
    dtype = mixed_precision.wide_dtype(dtype)
    rank = settings.rank
    found[a] = jax.ShapeDtypeStruct((*shape[:n], rank), dtype)
    found[b] = jax.ShapeDtypeStruct((shape[0], rank, *shape[n:]), dtype)
  return found


def init(params, settings: Lora, key: base.Key) -> dict[str, Any]:
  """A new adapter: A uniform within ±1/√inputs, as in PEFT, and B zero."""
  wanted = shapes(params, settings)

  @jax.jit
  def draw(key):
    adapter = {}
    for i, (name, x) in enumerate(wanted.items()):
      if '_B_' in name:
        adapter[name] = jnp.zeros(x.shape, x.dtype)
        continue
      bound = math.prod(x.shape[1:-1]) ** -0.5
      adapter[name] = jax.random.uniform(
        jax.random.fold_in(key, i), x.shape, x.dtype, -bound, bound
      )
    return adapter

  return {'layers': draw(key)}


def is_adapted(params) -> bool:
  """Whether parameters are those of an adapted policy."""
  return isinstance(params, dict) and ADAPTER in params


def rank(params) -> int:
  """The rank of the adapters of parameters; 0 without adapters."""
  if not is_adapted(params):
    return 0
  adapter = params[ADAPTER]['layers']
  names = (pair_names(p)[0] for p in LETTERS.values())
  return next(adapter[a].shape[-1] for a in names if a in adapter)


def pairs(params):
  """Yields the name, A and (α/r) B of each adapted matrix."""
  adapter, alpha = params[ADAPTER]['layers'], params[base.FROZEN][ALPHA]
  for p in LETTERS.values():
    a, b = pair_names(p)
    if a in adapter:
      scale = alpha / adapter[a].shape[-1]
      yield p, adapter[a], adapter[b] * scale.astype(adapter[b].dtype)


def with_layers(params, layers):
  """The model's parameters with `layers` replaced, and those of a critic."""
  own = params[base.FROZEN][PARAMS]
  rest = {k: v for k, v in params.items() if k not in (ADAPTER, base.FROZEN)}
  return own | rest | {'layers': own['layers'] | layers}


def join(params):
  """Parameters of the model with A and (α/r) B beside the weights.

  For training and scoring: `block.Block` adds (α/r) B A x where it finds them.
  """
  layers = {}
  for p, *pair in pairs(params):
    layers |= zip(pair_names(p), pair, strict=True)
  return with_layers(params, layers)


def merge(params):
  """Parameters of the model with W + (α/r) B A in place of W.

  The sum is computed in the dtype of A and B, and rounded to that of W.
  Quantized matrices are expanded first.
  """
  params = _expanded(params)
  layers, own = {}, params[base.FROZEN][PARAMS]['layers']
  # B A is wider than the rounded sum, and so takes more memory. The largest
  # matrix comes first, when there are no other sums yet.
  for p, a, b in sorted(pairs(params), key=lambda x: -own[x[0]].size):
    ins, outs = split(p)
    delta = jnp.einsum(f'L{ins}I,LI{outs}->L{ins}{outs}', a, b)
    # XLA would write W in float32, to add it within the product.
    delta = jax.lax.optimization_barrier(delta)
    layers[p] = (own[p].astype(delta.dtype) + delta).astype(own[p].dtype)
  return with_layers(params, layers)


def _expanded(params):
  """Parameters without quantized matrices."""
  frozen = params[base.FROZEN]
  own = frozen[PARAMS]
  layers = quantization.expand_layers(own['layers'], AXES)
  own = own | {'layers': layers}
  return params | {base.FROZEN: frozen | {PARAMS: own}}


def quantized(params, settings: Lora):
  """The parameters of a model as `settings` say to hold them.

  Raises:
    ValueError: if the model has experts, which stay as they are.
  """
  if settings.quantize is None:
    return params
  layers = params['layers']
  if any(p not in layers for p in LETTERS.values()):
    raise ValueError(
      f'quantize is {settings.quantize!r}, and this model has experts, which '
      'cannot be quantized: set it to None (LORA_QUANTIZE in gin).'
    )
  layers = quantization.quantize_layers(layers, AXES, settings.quantize)
  return params | {'layers': layers}


def prepared(
  function: Callable | None, prepare: Callable[[Any], Any]
) -> Callable | None:
  """Returns `function` of prepared parameters; None if there is no function."""
  if function is None:
    return None

  @functools.wraps(function)
  def run(params, *args, **kwargs):
    return function(prepare(params), *args, **kwargs)

  return run


def wrap(
  policy: base.Policy,
  settings: Lora,
  start: Callable[[Any], dict[str, Any]] | None = None,
) -> base.Policy:
  """A policy whose weights are frozen, with adapters that are trained.

  A critic of the policy, under the key `base.CRITIC`, is trained as before.

  Args:
    policy: a language model, such as `language_model.policy`. If an engine
      outside JAX acts, its `act` and `resume` take the adapted parameters as
      they are.
    settings: rank, alpha and targets.
    start: `params -> adapter`, which returns an existing adapter of the model;
      if None, a new adapter is drawn.

  Raises:
    ValueError: for quantized weights beside an engine outside JAX.
  """
  is_engine = policy.out_shapes is not None
  if is_engine and settings.quantize:
    raise ValueError(
      f'quantize is {settings.quantize!r}, and an engine generates, which does '
      'not read quantized weights: generate in JAX, or set quantize to None '
      '(LORA_QUANTIZE in gin).'
    )
  merged = (lambda params: params) if is_engine else merge

  def new(key):
    params = dict(policy.init(key))
    critic = {k: params.pop(k) for k in (base.CRITIC,) if k in params}
    if start:
      adapter = start(params)
    else:
      adapter = init(params, settings, jax.random.fold_in(key, 2))
    alpha = DEFAULT_ALPHA if settings.alpha is None else settings.alpha
    params = quantized(params, settings)
    frozen = {PARAMS: params, ALPHA: jnp.float32(alpha)}
    return {ADAPTER: adapter, base.FROZEN: frozen} | critic

  engine = policy.engine
  if engine:
    engine = engine._replace(
      equivalent=prepared(engine.equivalent, merge),
      resume=prepared(engine.resume, merge),
    )
  return policy._replace(
    init=new,
    act=prepared(policy.act, merged),
    evaluate=prepared(policy.evaluate, join),
    value=prepared(policy.value, join),
    resume=prepared(policy.resume, merged),
    engine=engine,
    # Acting multiplies A, B and α/r, and adds them to W, before it rounds.
    round_params=None,
    round_for_engine=None,
    trains_router=False,
  )
