"""Results of packed rows are those without packing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import claims
from sharding import mesh as mesh_lib
import stages
from stages import base, kernels, metrics, workflows
from stages.language import language_model, policy_stages, rollout_metrics
from stages.language.scoring import packing
from stages.learn import losses, objectives
from stages.models import lora
from tests.rlinf_jax.runtime.plans import invariance_test
from tests.stages.language.scoring import packing_plan_test
import tiny

GROUP = 4


def batch(seed=0, groups=4, T=tiny.LENGTH):
  """Prompts, completions, a mask and weights, with empty rows."""
  rng = np.random.default_rng(seed)
  prompt = jax.tree.map(
    lambda x: np.repeat(x, GROUP, 0), tiny.problem(groups, seed=seed).prompt
  )
  B = groups * GROUP
  length_B1 = rng.integers(0, T + 1, (B, 1))
  mask_BT = (np.arange(T)[None] < length_B1).astype(np.float32)
  action_BT = rng.integers(1, tiny.CONFIG.V, (B, T), np.int32)
  return prompt, action_BT, mask_BT, rng.normal(size=(B, T))


def scores_and_slopes(policy, params, given, slopes_of=lambda x: x):
  """Evaluations of real tokens, and the gradient of a sum of all of them."""
  prompt, action_BT, mask_BT, weight_BT = given

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def run(trained):
    now = policy.evaluate(
      slopes_of(trained), prompt, action_BT, group_size=GROUP, mask=mask_BT
    )
    now = jax.tree.map(lambda x: jnp.where(mask_BT > 0, x, 0.0), now)
    total = sum((x * weight_BT).sum() for x in jax.tree.leaves(now))
    return total, now

  return run(params)


@pytest.mark.usefixtures('in_float64')
@pytest.mark.parametrize('capacity', [10, 23])
def test_packing_changes_only_rounding(capacity):
  given = batch()
  policies = [tiny.policy('float64', packed_tokens=n) for n in (None, capacity)]
  params = policies[0].init(jax.random.key(0))
  params[base.CRITIC] = {'value_D': jnp.linspace(-1.0, 1.0, tiny.CONFIG.D)}
  want, got = (scores_and_slopes(p, params, given) for p in policies)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12),
    got[1],
    want[1],
  )
  assert invariance_test.apart(got[0], want[0]) <= 1e-10


LONG = 24  # More than four times the longest prompt.
ROOM = 128  # A shorter row is not worth a kernel.


def with_kernel(length=LONG):
  """A policy whose packed rows are long enough for a kernel."""
  return tiny.policy(length=length, packed_tokens=ROOM)


def test_a_kernel_of_packed_rows_changes_only_rounding(monkeypatch):
  given = batch(T=LONG)
  params = with_kernel().init(jax.random.key(0))
  want = scores_and_slopes(tiny.policy(length=LONG), params, given)
  # Interpreted here.
  monkeypatch.setitem(kernels.KERNELS, jax.default_backend(), kernels.SPLASH)
  assert packing.sharing(GROUP, 5, LONG) == 1
  got = scores_and_slopes(with_kernel(), params, given)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5),
    got[1],
    want[1],
  )
  assert invariance_test.apart(got[0], want[0]) <= 1e-5


@pytest.mark.parametrize(
  'platform, length, kernel',
  [
    ('tpu', LONG, kernels.SPLASH),
    ('tpu', 15, kernels.CHUNKED),  # Long prompts are shared.
    ('gpu', LONG, kernels.CHUNKED),
    ('cpu', LONG, kernels.CHUNKED),
  ],
)
def test_packed_rows_get_the_kernel_of_their_platform(platform, length, kernel):
  policy, found = with_kernel(length), {}
  prompt, action_BT, mask_BT, _ = batch(T=length)

  def run(params):
    scores = policy.evaluate(
      params, prompt, action_BT, group_size=GROUP, mask=mask_BT
    )
    return scores.logp.sum()

  params = jax.eval_shape(policy.init, jax.random.key(0))
  with jax.sharding.use_abstract_mesh(mesh_lib.abstract({}, platform)):
    jax.eval_shape(kernels.recorded(jax.grad(run), found), params)
  assert {choice.name for choice in found[platform]} == {kernel}


@pytest.mark.usefixtures('in_float64')
def test_frozen_weights_have_no_gradient_in_packed_rows():
  given = batch(1)
  policies = [
    lora.wrap(tiny.policy('float64', packed_tokens=n), lora.Lora(rank=2))
    for n in (None, 12)
  ]
  params = policies[0].init(jax.random.key(0))
  frozen = params.pop(base.FROZEN)
  params = jax.tree.map(lambda x: x + 0.1, params)
  want, got = (
    scores_and_slopes(p, params, given, lambda x: x | {base.FROZEN: frozen})
    for p in policies
  )
  assert invariance_test.apart(got[0], want[0]) <= 1e-10


def test_no_gradient_of_frozen_parameters_is_added_up():
  rows = packing.PackedRows(jnp.ones((3, 1, 4)), (), (), ())

  def score(params, rows):
    logp = rows.token * params['frozen'].sum() * params['trained'].sum()
    return base.Evaluation(logp, logp)

  def total(trained, frozen):
    params = {'trained': trained, 'frozen': frozen}
    return packing._while_used(score)(params, rows, 2).logp.sum()

  def carried(argnums):
    jaxpr = jax.make_jaxpr(jax.grad(total, argnums))(jnp.ones(5), jnp.ones(7))
    *_, backward = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == 'while')
    return [x.aval.shape for x in backward.outvars]

  assert (5,) in carried(0) and (7,) not in carried(0)
  assert {(5,), (7,)} <= {*carried((0, 1))}


def test_packed_rows_without_a_token_are_skipped():
  calls = []

  def score(params, rows):
    jax.debug.callback(lambda: calls.append(1))
    return base.Evaluation(params * rows.token, rows.token * 1.0)

  rows = jnp.arange(24.0).reshape(6, 1, 4)
  rows = packing.PackedRows(rows, (), (), ())
  run = packing._while_used(score)
  total = lambda params, used: run(params, rows, used).logp.sum()
  for used in 0, 1, 4:
    calls.clear()
    value, slope = jax.jit(jax.value_and_grad(total))(2.0, used)
    jax.effects_barrier()
    assert (value, slope) == (2 * slope, np.arange(4.0 * used).sum())
    assert len(calls) == 2 * used  # Forward and backward.


@functools.cache
def grpo(packed_tokens, aggregate):
  return workflows.grpo(
    tiny.policy('float64', packed_tokens=packed_tokens),
    invariance_test.even,
    invariance_test.KEEP,
    group_size=GROUP,
    kl_coef=0.3,
    entropy_coef=0.01,
    num_minibatches=2,
    minibatch_by='shuffled',
    mask_truncated=aggregate is losses.token_mean,
    aggregate=aggregate,
  )


@pytest.mark.slow
@pytest.mark.usefixtures('in_float64')
@pytest.mark.parametrize(
  'aggregate',
  claims.some(
    [
      losses.token_mean,
      losses.sequence_mean_token_mean,
      losses.constant(tiny.LENGTH),
    ],
    keep=[losses.token_mean],
  ),
)
def test_a_step_with_packing_learns_the_same(aggregate):
  problem, key = tiny.problem(8), jax.random.key(3)
  infos, states = [], []
  for packed_tokens in None, 15:
    workflow = grpo(packed_tokens, aggregate)
    state = invariance_test.begin(workflow)
    state, info = workflow.step(state, problem, key)
    states.append(state)
    infos.append(metrics.read(jax.device_get(info))[0])
  slopes = map(invariance_test.gradient, states)
  assert invariance_test.apart(*slopes) <= 1e-10
  paddings = [info.pop('rollout/padding') for info in infos]
  assert paddings[0] != paddings[1]
  for name, number in infos[0].items():
    np.testing.assert_allclose(
      infos[1][name], number, rtol=1e-10, atol=1e-12, err_msg=name
    )


@stages.stage('reward')
def first_half(answer, action, mask):
  """Rewards even tokens, but in groups of odd answers all completions alike."""
  verdict = tiny.even.fn(answer, action, mask)
  return verdict._replace(
    reward=jnp.where(answer % 2 == 0, verdict.reward, 0.5)
  )


@pytest.mark.slow
@pytest.mark.usefixtures('in_float64')
def test_groups_of_equal_rewards_are_not_computed_and_learn_the_same():
  problem, key = tiny.problem(8), jax.random.key(3)
  infos, states = [], []
  for packed_tokens in None, 15:
    workflow = workflows.grpo(
      tiny.policy('float64', packed_tokens=packed_tokens),
      first_half,
      invariance_test.KEEP,
      group_size=GROUP,
    )
    state = invariance_test.begin(workflow)
    state, info = workflow.step(state, problem, key)
    states.append(state)
    infos.append(tiny.read(info))
  assert infos[0]['rollout/groups_degenerate'] >= 0.5
  assert invariance_test.apart(*map(invariance_test.gradient, states)) <= 1e-10
  for name in 'train/policy_loss', 'train/grad_norm', 'train/entropy':
    np.testing.assert_allclose(
      infos[1][name], infos[0][name], rtol=1e-10, atol=1e-12, err_msg=name
    )


def test_completions_without_an_advantage_are_not_scored():
  mask_BT = jnp.float32([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
  advantage_BT = jnp.float32([[0, 0, 0], [2, 0, 0], [0, 0, -1], [0, 0, 0]])
  scored_BT = []

  def evaluate(params, obs, action_BT, *, group_size, mask):
    scored_BT.append(mask)
    nan_BT = jnp.full(mask.shape, jnp.nan)
    return base.Evaluation(jnp.where(mask > 0, params - 1.0, nan_BT), nan_BT)

  policy = tiny.policy(packed_tokens=15)._replace(evaluate=evaluate)
  action_BT = jnp.zeros((4, 3), jnp.int32)
  x = base.Experience((), action_BT, jnp.full((4, 3), -2.0), mask_BT, ())
  x = x._replace(advantage=advantage_BT)
  found = []
  for only in False, True:
    loss = objectives.policy(policy_stages.scorer(policy, GROUP, only))
    found.append(
      jax.value_and_grad(lambda w, f=loss: f(w, x, ()).means[0].sum)(0.0)
    )
  np.testing.assert_array_equal(scored_BT[0], mask_BT)
  np.testing.assert_array_equal(scored_BT[1].sum(1), [0, 1, 3, 0])
  assert found[0] == found[1] and found[0][1] != 0


def test_padding_is_counted_with_and_without_packing():
  prompt, action_BT, mask_BT, _ = batch(2)
  x = base.Experience(prompt, action_BT, mask_BT, mask_BT, mask_BT[:, 0])
  P, T, G = 5, tiny.LENGTH, GROUP
  before_NP = prompt.mask[::G].sum(1) - 1
  real = before_NP[mask_BT.reshape(4, -1).any(1)].sum() + mask_BT.sum()
  got = rollout_metrics.padding(prompt.mask, mask_BT, G).value()['']
  np.testing.assert_allclose(got, 1 - real / (4 * (P + G * T)), rtol=1e-6)
  padding = rollout_metrics.packed_padding(tiny.policy(packed_tokens=12), G)
  info = padding([(x, ())])
  sizes, _ = packing_plan_test.first_fit(
    before_NP, mask_BT.sum(1).astype(int), 12
  )
  share = 1 - sum(sizes) / (12 * len(sizes))
  np.testing.assert_allclose(
    info['rollout/padding'].value()[''], share, rtol=1e-6
  )
  # Of examples, as in supervised learning.
  for capacity, want in ((None, got), (12, share)):
    policy = tiny.policy(packed_tokens=capacity)
    info = rollout_metrics.example_padding(policy, G)(
      base.Example(prompt, action_BT, mask_BT)
    )
    np.testing.assert_allclose(
      info['train/padding'].value()[''], want, rtol=1e-6
    )


def test_a_policy_that_does_not_pack_ignores_the_mask():
  prompt, action_BT, mask_BT, _ = batch()
  policy = language_model.policy(tiny.CONFIG, response_length=tiny.LENGTH)
  params = policy.init(jax.random.key(0))
  evaluate = jax.jit(functools.partial(policy.evaluate, group_size=GROUP))
  tiny.assert_same_bits(
    evaluate(params, prompt, action_BT, mask=mask_BT),
    evaluate(params, prompt, action_BT),
  )


@pytest.mark.slow
@pytest.mark.usefixtures('in_float64')
@pytest.mark.parametrize(
  'place, capacity',
  claims.some([('fsdp', 15), ('mixed', 16)], keep=[('mixed', 16)]),
)
def test_packed_rows_of_all_devices_learn_the_same(place, capacity):
  workflow = grpo(capacity, losses.token_mean)
  problem, key = tiny.problem(16), jax.random.key(3)
  state = invariance_test.begin(workflow)
  want = workflow.step(state, problem, key)
  got = invariance_test.planned(workflow, state, problem, key, place, {})
  invariance_test.same(got, want, 1e-9)
