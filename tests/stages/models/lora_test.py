"""Adapters beside frozen weights: what they compute, and what is trained."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.ir import plan as plan_lib
from planner.ir.instruction import Send
from planner.lower import program
from stages import base, workflows
from stages.language import value_model
from stages.learn import losses, optimizers, train_step
from stages.models import lora
import tiny

KEY = jax.random.key(0)
GROUP = 4


@functools.cache
def adapted(targets='qkvogud'):
  settings = lora.Lora(rank=3, alpha=12.0, targets=targets)
  return lora.wrap(tiny.policy(length=4), settings)


def trained(params, seed=0):
  """Parameters whose B is no longer zero."""
  leaves, tree = jax.tree.flatten(params[lora.ADAPTER])
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  noise = [
    0.1 * jax.random.normal(key, x.shape)
    for key, x in zip(keys, leaves, strict=True)
  ]
  return params | {lora.ADAPTER: jax.tree.unflatten(tree, noise)}


def rows():
  prompt = jax.tree.map(
    lambda x: np.repeat(x, GROUP, 0), tiny.problem(4).prompt
  )
  action = np.random.default_rng(0).integers(1, tiny.CONFIG.V, (4 * GROUP, 4))
  return prompt, action.astype(np.int32)


def logp(policy, params):
  evaluate = functools.partial(policy.evaluate, group_size=GROUP)
  return jax.jit(evaluate)(params, *rows()).logp


def test_a_new_adapter_changes_no_bit():
  policy, model = adapted(), tiny.policy(length=4)
  params, own = policy.init(KEY), model.init(KEY)
  tiny.assert_same_bits(logp(policy, params), logp(model, own))
  prompt = tiny.problem().prompt
  keys = jax.random.split(KEY, 8)
  tiny.assert_same_bits(
    jax.jit(policy.act)(params, prompt, keys),
    jax.jit(model.act)(own, prompt, keys),
  )


@pytest.mark.parametrize('targets', ['qkvogud', 'vd'])
def test_adapters_compute_what_merged_weights_do(targets):
  policy = adapted(targets=targets)
  params = trained(policy.init(KEY))
  got = logp(policy, params)
  want = logp(tiny.policy(length=4), lora.merge(params))
  np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
  assert np.abs(got - logp(policy, policy.init(KEY))).max() > 0.1


def test_merged_weights_are_the_formula():
  """W + (α/r) B A of one layer, by NumPy."""
  params = trained(adapted().init(KEY))
  frozen = params[base.FROZEN][lora.PARAMS]['layers']
  adapter, merged = params[lora.ADAPTER]['layers'], lora.merge(params)['layers']
  a, b = (np.asarray(adapter[f'query_{x}'][1]) for x in ('A_DI', 'B_IHW'))
  want = np.asarray(frozen['query_DHW'][1]).reshape(32, -1)
  want = want + 12.0 / 3 * (a @ b.reshape(3, -1))
  got = np.asarray(merged['query_DHW'][1]).reshape(32, -1)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  assert merged['before_attention_D'] is frozen['before_attention_D']


def test_gradients_are_those_of_the_dense_formula():
  """∂L/∂A = (α/r) G Bᵀ and ∂L/∂B = (α/r) Aᵀ G, of G = ∂L/∂W, by NumPy."""
  policy, model = adapted(), tiny.policy(length=4)
  params = trained(policy.init(KEY))

  def loss(evaluate, params, x):
    lp = evaluate(params, *x, group_size=GROUP).logp
    return (losses.token_mean(-lp, jnp.ones_like(lp)),), {}

  run = train_step.gradient(functools.partial(loss, policy.evaluate))
  got = jax.jit(run)(params, rows()).numerators[0]
  assert got.keys() == {lora.ADAPTER}
  run = train_step.gradient(functools.partial(loss, model.evaluate))
  dense = jax.jit(run)(lora.merge(params), rows()).numerators[0]['layers']
  for p, a, _ in lora.pairs(params):
    ins, b = int(np.prod(a.shape[1:-1])), lora.pair_names(p)[1]
    b = np.asarray(params[lora.ADAPTER]['layers'][b]).reshape(2, 3, -1)
    a = np.asarray(a).reshape(2, ins, 3)
    g = np.asarray(dense[p]).reshape(2, ins, -1)
    wants = 4 * g @ b.swapaxes(1, 2), 4 * a.swapaxes(1, 2) @ g
    for name, want in zip(lora.pair_names(p), wants, strict=True):
      mine = np.asarray(got[lora.ADAPTER]['layers'][name]).reshape(want.shape)
      limit = 1e-5 * np.abs(want).max()
      np.testing.assert_allclose(
        mine, want, rtol=1e-4, atol=limit, err_msg=name
      )


class Up(nn.Module):
  """An adapted matrix in bfloat16."""

  def setup(self):
    self.up_DF = self.get_variable('params', 'up_DF').astype(jnp.bfloat16)

  def __call__(self, x_BTD):
    return lora.linear(self, 'up_DF', 'BTD,DF->BTF', x_BTD)


def test_the_sum_with_an_adapter_is_not_taken_in_float32():
  """On GPUs, it was the larger part of what a layer wrote to memory."""
  rng, F = np.random.default_rng(0), 48
  shapes = {'up_DF': (16, F), 'up_A_DI': (16, 3), 'up_B_IF': (3, F)}
  params = {
    name: jnp.asarray(rng.normal(size=shape), jnp.bfloat16).astype(jnp.float32)
    for name, shape in shapes.items()
  }
  x_BTD = jnp.asarray(rng.normal(size=(2, 5, 16)), jnp.bfloat16)

  def forward(adapter, x_BTD):
    return Up().apply({'params': params | adapter}, x_BTD)

  def both(adapter, x_BTD):
    y_BTF, pull = jax.vjp(forward, adapter, x_BTD)
    return y_BTF, pull(y_BTF)

  adapter = {x: params[x] for x in ('up_A_DI', 'up_B_IF')}
  jaxpr = str(jax.make_jaxpr(both)(adapter, x_BTD))
  assert f'bf16[2,5,{F}]' in jaxpr
  assert f'f32[2,5,{F}]' not in jaxpr
  y_BTF, (adapter_bar, x_bar) = both(adapter, x_BTD)
  assert {x.dtype for x in adapter_bar.values()} == {jnp.dtype('float32')}
  w, a, b, x = (np.asarray(v, np.float64) for v in (*params.values(), x_BTD))
  y = np.asarray(y_BTF, np.float64)
  wants = {
    'y': (y, x @ (w + a @ b)),
    'x': (x_bar, y @ (w + a @ b).T),
    'A': (adapter_bar['up_A_DI'], np.einsum('btd,btf->df', x, y) @ b.T),
    'B': (adapter_bar['up_B_IF'], np.einsum('bti,btf->if', x @ a, y)),
  }
  for name, (got, want) in wants.items():
    error = np.asarray(got, np.float64) - want
    # Of three roundings to eight bits.
    assert np.linalg.norm(error) < 3 * 2**-9 * np.linalg.norm(want), name


def grpo(optimizer, **kwargs):
  return workflows.grpo(
    adapted(), tiny.even, optimizer, group_size=GROUP, **kwargs
  )


def test_only_adapters_have_moments_and_cross_places():
  workflow = grpo(optimizers.adamw(1e-2), kl_coef=0.1, staleness=1)
  state = jax.eval_shape(workflow.init, KEY)
  adapter = sum(x.size for x in jax.tree.leaves(state.actor.params['adapter']))
  moments = sum(x.size for x in jax.tree.leaves(state.actor.opt_state))
  assert 2 * adapter <= moments < 2 * adapter + 20
  frozen = jax.tree.leaves(state.actor.params[base.FROZEN])
  assert base.FROZEN not in state.reference
  assert base.FROZEN not in state.past[0].params

  flow = tiny.trace(workflow, tiny.problem())
  names = {flow.values[v].name for v in flow.constants}
  names = {name for name in names if 'frozen' in name}
  assert len(names) == len(frozen)
  places = {'act': tiny.PLACES['one'], 'learn': plan_lib.Placement((1,))}
  stages = {
    name: 'act' if name in ('generate', 'keys', 'repeat') else 'learn'
    for name in flow.stages
  }
  plan = plan_lib.Plan(places, stages)
  sent = {
    flow.values[op.value].name
    for ops in program.lower(flow, plan).values()
    for op in ops
    if isinstance(op, Send)
  }
  assert any('adapter' in name for name in sent)
  assert not any('frozen' in name for name in sent)
  homes = program.homes(flow, plan)
  read = [v for v in homes if flow.values[v].name in names]
  assert all(set(homes[v]) <= {'act', 'learn'} for v in read)


def frozen_values(workflow, batch):
  """Names of the frozen values that a step carries, and of those it replaces.

  The name of a value begins with the path to it in the state.
  """
  flow = tiny.trace(workflow, batch)
  named = [
    (flow.values[v].name, v == end)
    for v, end in flow.carry
    if base.FROZEN in flow.values[v].name
  ]
  return [name for name, _ in named], [name for name, same in named if not same]


@pytest.mark.parametrize('name', ['dpo', 'head', 'own', 'sft', 'dapo'])
def test_every_workflow_carries_frozen_weights_once(name):
  policy, adamw = adapted(), optimizers.adamw(1e-2)
  critics = {'head': value_model.head, 'own': value_model.own_trunk}
  if name == 'dpo':
    workflow, batch = workflows.dpo(policy, adamw), tiny.pairs()
  elif name == 'sft':
    workflow = workflows.sft(policy, tiny.even, adamw)
    batch = tiny.examples()
  elif name == 'dapo':
    sizes = {'group_size': GROUP, 'max_rounds': 2}
    workflow = workflows.dapo(policy, tiny.even, adamw, **sizes)
    batch = tiny.problem()
  else:
    workflow = workflows.ppo(
      policy,
      tiny.even,
      critics[name](tiny.CONFIG),
      adamw,
      adamw,
      group_size=GROUP,
      kl_coef=0.1,
      staleness=1,
    )
    batch = tiny.problem()
  carried, replaced = frozen_values(workflow, batch)
  params = jax.eval_shape(policy.init, KEY)
  assert len(carried) == len(jax.tree.leaves(params[base.FROZEN]))
  assert not replaced


@pytest.mark.slow
def test_grpo_learns_with_adapters_and_leaves_the_weights():
  workflow = grpo(optimizers.adamw(2e-2))
  state = first = workflow.init(KEY)
  rewards = []
  for i in range(30):
    batch = tiny.problem(seed=i)
    state, info = workflow.step(state, batch, jax.random.fold_in(KEY, i))
    rewards.append(tiny.read(info)['rollout/reward_mean'])
  assert np.mean(rewards[:3]) < 0.65 < 0.9 < np.mean(rewards[-3:])
  tiny.assert_same_bits(
    state.actor.params[base.FROZEN], first.actor.params[base.FROZEN]
  )


def test_targets_are_letters_or_names():
  assert lora.parameters('vq') == ('query_DHW', 'value_DKW')
  assert lora.parameters(('q_proj', 'd')) == ('query_DHW', 'down_FD')
  assert lora.parameters('o_proj') == ('out_HWD',)
  with pytest.raises(ValueError, match="q_proj, k_proj.*; 'x' was given"):
    lora.Lora(rank=2, targets='qx')
  with pytest.raises(ValueError, match='rank of LoRA is -1'):
    lora.Lora(rank=-1)
  assert not lora.Lora() and lora.Lora(rank=2)
