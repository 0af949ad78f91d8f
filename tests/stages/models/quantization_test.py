"""Quantized frozen weights: their error, and adapters beside them."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from sharding import mesh as meshes
from sharding import rules
from stages import base
from stages.language import language_model, policy_stages
from stages.models import lora, quantization
from tests.rlinf_jax.runtime.plans import invariance_test
import tiny

pytest.importorskip('qwix', reason='pip install "rlinf-jax[qlora]".')

KINDS = 'int8', 'nf4'
# Inputs that whole blocks divide, and others.
CONFIG = dataclasses.replace(tiny.CONFIG, D=128, F=96, init_stddev=0.3)


def levels() -> np.ndarray:
  """The 16 levels of nf4, as QLoRA derives them from quantiles."""
  tail = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))
  below = -scipy.stats.norm.ppf(np.linspace(tail, 0.5, 8)[:-1])
  above = scipy.stats.norm.ppf(np.linspace(tail, 0.5, 9)[:-1])
  found = np.sort([*below, 0.0, *above])
  return found / found[-1]


def by_hand(w, kind, block):
  """A matrix [inputs, outputs], quantized and expanded, block by block."""
  found = np.empty_like(w)
  for i in range(0, len(w), block):
    for j in range(w.shape[1]):
      x = w[i : i + block, j]
      if kind == 'int8':
        scale = np.abs(x).max() / 127.5
        level = np.clip(np.round(x / scale), -128, 127)
      else:
        scale = np.abs(x).max()
        level = levels()[np.abs(x[:, None] / scale - levels()).argmin(1)]
      found[i : i + block, j] = scale * level
  return found


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('inputs, block', [(128, 64), (96, 48), (14, 14)])
def test_each_block_is_rounded_to_its_own_levels(kind, inputs, block):
  w = np.random.default_rng(0).normal(size=(inputs, 5)).astype(np.float32)
  q, s = quantization.quantize(jnp.asarray(w), 0, kind)
  assert q.nbytes == w.size // (2 if kind == 'nf4' else 1)
  assert s.shape == (inputs // block, 5)
  got = jax.jit(lambda q, s: quantization.expand(q, s, 0))(q, s)
  largest = np.abs(w.reshape(-1, block, 5)).max(1, keepdims=True)
  # The largest number of a block lies halfway between two levels of int8.
  is_tie = (np.abs(w.reshape(-1, block, 5)) == largest).reshape(w.shape)
  is_known = ~is_tie | (kind == 'nf4')
  want = by_hand(w, kind, block)
  np.testing.assert_allclose(got[is_known], want[is_known], atol=1e-5)
  # Half of the widest gap between levels, of the largest number of a block.
  gap = {'int8': 1 / 127.5, 'nf4': np.diff(levels()).max()}[kind]
  error = np.abs(got - w).reshape(-1, block, 5) / largest
  assert error.max() <= 0.5 * gap + 1e-6


@functools.cache
def quantized(kind, dtype='float32', **kwargs):
  config = dataclasses.replace(CONFIG, dtype=dtype, **kwargs)
  policy = language_model.policy(config, response_length=tiny.LENGTH, stop=(0,))
  return lora.wrap(policy, lora.Lora(rank=2, targets='qog', quantize=kind))


def started(policy, seed=0):
  """Parameters whose adapters are no longer zero."""
  params = policy.init(jax.random.key(seed))
  adapter = jax.tree.map(lambda x: x + 0.05, params[lora.ADAPTER])
  return params | {lora.ADAPTER: adapter}


def expanded(params):
  """The same parameters with matrices expanded by the library, by hand."""
  import qwix

  frozen = params[base.FROZEN]
  layers = dict(frozen[lora.PARAMS]['layers'])
  for name in lora.LETTERS.values():
    q, s = layers[name], layers.pop(quantization.scale_name(name))
    kind, axis = q.dtype, 1 + lora.AXES[name]
    if kind == jnp.uint8:
      kind, levels = 'nf4', np.empty((*q.shape, 2), np.uint8)
      levels[..., 0], levels[..., 1] = q % 16, q // 16
      levels = np.moveaxis(levels, -1, axis + 1)
      shape = [n * (1 + (i == axis)) for i, n in enumerate(q.shape)]
      q = jnp.asarray(levels.reshape(shape))
    layers[name] = qwix.dequantize(qwix.QArray(q, s, qtype=kind))
  own = frozen[lora.PARAMS] | {'layers': layers}
  return params | {base.FROZEN: frozen | {lora.PARAMS: own}}


def scores(policy, x=tiny.examples(8)):
  """Returns `params -> gradient of adapters, log-probabilities`."""

  @functools.partial(jax.grad, has_aux=True)
  def run(trained, frozen):
    params = trained | {base.FROZEN: frozen}
    now = policy_stages.score(policy, params, x.prompt, x.action, x.mask)
    logp = now.logp * x.mask
    return (logp * jnp.cos(jnp.arange(logp.size)).reshape(logp.shape)).sum(), (
      logp
    )

  def of_params(params):
    params = dict(params)
    frozen = params.pop(base.FROZEN)
    return run(params, frozen)

  return of_params


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('remat', ['none', 'nothing_saveable'])
def test_adapters_learn_as_beside_expanded_weights(kind, remat):
  policy = quantized(kind, remat=remat)
  params = started(policy)
  run = jax.jit(scores(policy))
  got, want = run(params), run(expanded(params))
  np.testing.assert_allclose(got[1], want[1], rtol=0, atol=1e-5)
  assert invariance_test.apart(got[0], want[0]) <= 1e-4
  # Nothing else is quantized.
  layers = params[base.FROZEN][lora.PARAMS]['layers']
  kinds = {name for name, x in layers.items() if x.dtype != jnp.float32}
  assert kinds == {*lora.LETTERS.values()}


@pytest.mark.parametrize('kind', KINDS)
def test_sampling_and_scoring_agree(kind):
  policy = quantized(kind)
  params, problem = started(policy), tiny.problem(8)
  keys = jax.random.split(jax.random.key(1), 8)
  x = jax.jit(policy.act)(params, problem.prompt, keys)
  now = jax.jit(policy.evaluate)(params, x.obs, x.action)
  np.testing.assert_allclose(now.logp * x.mask, x.logp * x.mask, atol=5e-5)
  merged = jax.jit(lora.merge)(params)
  whole = jax.jit(lora.merge)(expanded(params))
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=1e-6), merged, whole
  )


def test_no_expanded_weights_of_all_layers_are_kept():
  policy = quantized('nf4')
  params = jax.eval_shape(policy.init, jax.random.key(0))
  program = str(jax.make_jaxpr(scores(policy))(params))
  c = CONFIG
  for name, shape in {'gate': (c.D, c.F), 'query': (c.D, c.H, c.W)}.items():
    halved = ','.join(map(str, (c.L, shape[0] // 2, *shape[1:])))
    assert f'u8[{halved}]' in program, name
    assert f'f32[{",".join(map(str, (c.L, *shape)))}]' not in program, name


@pytest.mark.usefixtures('in_float64')
def test_quantized_weights_on_several_devices_score_the_same():
  policy = quantized('nf4', 'float64')
  params = started(policy)
  want = jax.jit(scores(policy))(params)
  mesh = meshes.mesh(jax.devices(), {'data': 2, 'fsdp': 2, 'tensor': 2})
  with jax.set_mesh(mesh):
    placed = jax.device_put(params, rules.shardings(params, mesh))
    layers = placed[base.FROZEN][lora.PARAMS]['layers']
    assert layers['gate_scale_DF'].sharding.spec[1:] == ('fsdp', 'tensor')
    got = jax.jit(scores(policy))(placed)
  np.testing.assert_allclose(got[1], want[1], rtol=0, atol=1e-9)
  assert invariance_test.apart(got[0], want[0]) <= 1e-9


def test_what_cannot_be_quantized_is_refused(monkeypatch):
  with pytest.raises(ValueError, match="to 'int3': give 'int8', 'nf4'"):
    lora.Lora(rank=2, quantize='int3')
  settings = lora.Lora(rank=2, targets='qv', quantize='nf4')
  policy = lora.wrap(tiny.policy(config=tiny.EXPERTS), settings)
  with pytest.raises(ValueError, match='this model has experts, which'):
    policy.init(jax.random.key(0))
  odd = jnp.ones((7, 2))
  with pytest.raises(ValueError, match='7 inputs, an odd number'):
    quantization.quantize(odd, 0, 'nf4')
  engine = tiny.policy()._replace(out_shapes=lambda *x: x)
  with pytest.raises(ValueError, match='and an engine generates, which does'):
    lora.wrap(engine, settings)
  monkeypatch.setitem(sys.modules, 'qwix', None)
  with pytest.raises(ValueError, match=r"pip install 'rlinf-jax\[qlora\]'"):
    lora.Lora(rank=2, quantize='int8')
  assert not lora.Lora(quantize='int8')  # Without a rank, nothing is adapted.
