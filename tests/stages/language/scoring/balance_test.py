"""The balance of experts: laws, an oracle in NumPy, cuts and meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import claims
from sharding import mesh as meshes
from sharding import rules
from stages import base, metrics, workflows
from stages.language import policy_stages
from stages.language.scoring import balance
from stages.models import lora, transformer
from stages.models.layers import attention, mixture
from tests.rlinf_jax.runtime.plans import invariance_test
from tests.stages.language.scoring import packing_test
import tiny

GROUP, E, K = packing_test.GROUP, tiny.EXPERTS.E, 2


def one_sequence(prob_SE, expert_SK):
  """The balance of one layer, all of whose positions are one sequence."""
  routing = mixture.Routing(
    jnp.asarray(prob_SE)[None, None], jnp.asarray(expert_SK)[None, None]
  )
  segment = attention.Segment(jnp.zeros((1, len(prob_SE)), jnp.int32), None)
  return jax.jit(balance.of_packed)(routing, segment)


def test_the_loss_is_one_where_experts_are_equally_likely():
  rng = np.random.default_rng(0)
  expert = rng.permuted(np.tile(np.arange(6), (10, 1)), axis=1)[:, :2]
  found = one_sequence(np.full((10, 6), 1 / 6), expert)
  np.testing.assert_allclose(found.loss, np.ones((1, 10)), rtol=1e-6)
  np.testing.assert_array_equal(
    found.load[0], np.bincount(expert.ravel(), minlength=6)
  )


def test_the_loss_is_largest_where_the_same_experts_have_all_tokens():
  prob = np.zeros((7, 6))
  prob[:, [1, 4]] = 0.5
  found = one_sequence(prob, np.tile([4, 1], (7, 1)))
  np.testing.assert_allclose(found.loss, np.full((1, 7), 6 / 2), rtol=1e-6)
  load = metrics.Load(jax.device_get(found.load)).value()['']
  np.testing.assert_allclose(load, 6 / 2)
  np.testing.assert_allclose(metrics.Load(np.ones((2, 6))).value()[''], 1.0)


def params_and_batch(dtype='float64', seed=0):
  """Parameters whose routers prefer some experts, and a ragged batch."""
  params = tiny.policy(dtype, config=tiny.EXPERTS).init(jax.random.key(seed))
  return params, packing_test.batch(seed)


def by_hand(params, prompt, action_BT, mask_BT):
  """Loss of each row and load [L, E], by loops over rows, layers and tokens."""
  model = transformer.Transformer(tiny.EXPERTS)
  read = jax.jit(
    lambda token_1S, mask_1S: model.apply(
      {'params': params}, token_1S, mask_1S, mutable=[mixture.ROUTING]
    )[1][mixture.ROUTING]['layers'][mixture.ROUTING]
  )
  loss_B, load = [], np.zeros((tiny.EXPERTS.L, E))
  room = prompt.token.shape[1] + action_BT.shape[1]
  for b, length in enumerate(mask_BT.sum(1).astype(int)):
    own = prompt.token[b][prompt.mask[b] > 0]
    tokens = [*own, *action_BT[b, : max(length - 1, 0)]]
    n = len(tokens)
    padded = np.zeros((1, room), np.int32)
    padded[0, :n] = tokens
    found = read(padded, (np.arange(room) < n)[None].astype(np.int32))
    layers = []
    for i in range(tiny.EXPERTS.L):
      prob = np.asarray(found.prob[i, 0, :n], np.float64)
      count = np.zeros(E)
      for t in range(n):
        for e in np.argsort(-prob[t])[:K]:
          count[e] += 1
      layers.append((E / (K * n) * count * prob.mean(0)).sum())
      load[i] += count * (length > 0)
    loss_B.append(np.mean(layers))
  return np.array(loss_B), load


@pytest.mark.usefixtures('in_float64')
@pytest.mark.parametrize(
  'packed_tokens', claims.some([None, 10, 23], keep=[None, 10])
)
def test_each_sequence_has_the_balance_of_its_own_tokens(packed_tokens):
  params, (prompt, action_BT, mask_BT, _) = params_and_batch()
  want_B, load = by_hand(params, prompt, action_BT, mask_BT)
  assert want_B.std() > 0.01
  policy = tiny.policy(
    'float64', config=tiny.EXPERTS, packed_tokens=packed_tokens
  )
  score = functools.partial(
    policy_stages.score, policy, group_size=GROUP, balance=True
  )
  found = jax.jit(score)(params, prompt, action_BT, mask_BT).balance
  loss_BT = np.where(mask_BT > 0, found.loss, 0.0)
  np.testing.assert_allclose(loss_BT, want_B[:, None] * mask_BT, atol=1e-12)
  np.testing.assert_allclose(found.load, load, atol=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures('in_float64')
def test_packing_leaves_out_no_sequence_without_an_advantage():
  workflow = workflows.grpo(
    tiny.policy('float64', config=tiny.EXPERTS, packed_tokens=15),
    invariance_test.even,
    invariance_test.KEEP,
    group_size=GROUP,
    balance_coef=0.5,
    advantage=jnp.zeros_like,
  )
  state = workflow.init(jax.random.key(0))
  step = jax.jit(workflow.step)
  state, info = step(state, tiny.problem(2, 6), jax.random.key(3))
  router_LDE = invariance_test.gradient(state)['layers']['router_DE']
  assert np.abs(router_LDE).max() > 1e-4
  assert tiny.read(info)['train/balance_loss'] > 0.9


def sft(balance_coef=0.5, dtype='float64'):
  policy = tiny.policy(dtype, config=tiny.EXPERTS)
  return workflows.sft(
    policy, None, invariance_test.KEEP, balance_coef=balance_coef
  )


@functools.cache
def eager():
  workflow = sft()
  state = workflow.init(jax.random.key(0))
  batch = tiny.examples(16, 6)
  return state, batch, workflow.step(state, batch, jax.random.key(1))


@pytest.mark.slow
@pytest.mark.usefixtures('in_float64')
@pytest.mark.parametrize(
  'place, rows',
  claims.some(
    [('one', 16), ('one', 4), ('data', 8), ('fsdp', 16), ('mixed', 8)],
    [('mixed', 8)],
  ),
)
def test_no_plan_changes_the_balance(place, rows):
  state, batch, (want, expected) = eager()
  got, info = invariance_test.planned(
    sft(), state, batch, jax.random.key(1), place, {'gradient': rows}
  )
  slopes = (optax.tree.get(x.opt_state, 'trace') for x in (got, want))
  assert invariance_test.apart(*slopes) <= 1e-9
  info, expected = tiny.read(info), tiny.read(expected)
  assert expected['train/expert_load'] > 1.0
  for name, number in expected.items():
    np.testing.assert_allclose(info[name], number, rtol=1e-9, err_msg=name)


def test_what_nothing_reads_is_not_computed():
  policy, x = tiny.policy(config=tiny.EXPERTS), tiny.examples(3)
  params = jax.eval_shape(policy.init, jax.random.key(0))
  (_, P), (B, T) = x.prompt.token.shape, x.action.shape
  kept = f'f32[{tiny.EXPERTS.L},{B},{P + T},{E}]'

  def program(balance):
    run = lambda params: policy_stages.score(
      policy, params, x.prompt, x.action, x.mask, balance=balance
    )
    return str(jax.make_jaxpr(run)(params))

  assert kept in program(True) and kept not in program(False)
  state = jax.eval_shape(sft(0.0, 'float32').init, jax.random.key(0))
  step = functools.partial(sft(0.0, 'float32').step, key=None)
  _, info = jax.eval_shape(step, state, x)
  assert not {'train/balance_loss', 'train/expert_load'} & info.keys()


@pytest.mark.usefixtures('in_float64')
def test_experts_on_several_devices_have_the_same_balance():
  params, (prompt, action_BT, mask_BT, _) = params_and_batch()
  policy = tiny.policy('float64', config=tiny.EXPERTS)

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def loss(params):
    now = policy_stages.score(
      policy, params, prompt, action_BT, mask_BT, GROUP, balance=True
    )
    return (now.balance.loss * mask_BT).sum(), now.balance.load

  want = loss(params)
  mesh = meshes.mesh(jax.devices(), {'data': 2, 'expert': 4})
  with jax.set_mesh(mesh):
    got = loss(jax.device_put(params, rules.shardings(params, mesh)))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9),
    got,
    want,
  )


@pytest.mark.slow
def test_the_loss_evens_out_the_load():
  policy = tiny.policy(config=tiny.EXPERTS)
  params, x = policy.init(jax.random.key(0)), tiny.examples(16)
  # Nearly all tokens start at two experts.
  shared_D = jnp.sign(params['embed_VD'].mean(0))
  params['embed_VD'] = jnp.abs(params['embed_VD']) * shared_D[None]
  router_LDE = params['layers']['router_DE']
  router_LDE = router_LDE.at[..., :K].add(0.3 * shared_D[:, None])
  params['layers']['router_DE'] = router_LDE

  def train(balance_coef):
    """The load before the first of some steps, and after the last."""
    workflow = workflows.sft(
      policy, None, optax.adam(3e-2), balance_coef=balance_coef
    )
    step = jax.jit(lambda state: workflow.step(state, x, None)[0])
    state = workflow.init(jax.random.key(0))._replace(params=params)
    before = load(state.params)
    for _ in range(25):
      state = step(state)
    return before, load(state.params)

  @jax.jit
  def counts(params):
    return policy_stages.score(
      policy, params, x.prompt, x.action, x.mask, balance=True
    ).balance.load

  def load(params):
    return metrics.Load(jax.device_get(counts(params))).value()['']

  (before, even), (_, uneven) = train(0.5), train(0.0)
  assert before > 1.9 and uneven > 1.6 and even < 1.3


@pytest.mark.parametrize(
  'policy',
  [
    tiny.policy(),
    lora.wrap(
      tiny.policy(config=tiny.EXPERTS), lora.Lora(rank=2, targets='qv')
    ),
  ],
)
def test_a_balance_without_a_trained_router_is_refused(policy):
  with pytest.raises(ValueError, match=r'0\.01, and this policy trains no ro'):
    workflows.dpo(policy, optax.sgd(0.1), balance_coef=0.01)


def test_a_balance_without_a_mask_is_refused():
  policy = tiny.policy(config=tiny.EXPERTS)
  prompt = base.Prompt(jnp.ones((4, 2), int), jnp.ones((4, 2), int))
  with pytest.raises(ValueError, match='no mask says'):
    policy.evaluate({}, prompt, jnp.ones((4, 3), int), balance=True)
