"""A plan never changes the mathematics: micro-batches, meshes, padding.

Each plan is compared with the workflow called with arrays, with tolerances for
the algebra (float64) and for rounding (float32).
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import claims
import in_memory
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import local
from sharding import rules
import stages
from stages import base, metrics, workflows
from stages.learn import losses
import tiny

GROUP, ROWS = 4, 32
# Keeps the gradient in its state, where a test can read it, and follows it in
# small steps: a large one multiplies the rounding of the first update before
# the second gradient is taken (at 0.1 by five, in every leaf alike).
KEEP = optax.chain(optax.trace(decay=0.0), optax.scale(-0.01))
TOLERANCE = {'float32': 1e-5, 'float64': 1e-9}


@pytest.fixture(params=['float32', 'float64'])
def dtype(request):
  # For all threads, as the runtime compiles on threads of its own.
  jax.config.update('jax_enable_x64', request.param == 'float64')
  yield request.param
  jax.config.update('jax_enable_x64', False)


@stages.stage('reward')
def even(answer, action, mask):
  """`tiny.even` in the widest float type, so that its sums are exact."""
  return tiny.even.fn(answer, action, mask.astype(jnp.result_type(float)))


@functools.cache
def grpo(dtype, **kwargs):
  # A strong pull to the reference. Advantages add up to zero in a group, and a
  # softmax hardly sees a key's bias: with a weak one that gradient cancels to a
  # hundredth of the others, and float32 leaves 1.5e-5 uncertain. By k2, since
  # the exponential of k3 turns the rounding of log-probabilities into as large
  # a share of every gradient (5e-6 of each leaf, and 2e-6 by k2).
  pull = {'kl_coef': 1.0, 'kl_estimator': losses.kl_k2}
  return workflows.grpo(
    tiny.policy(dtype), even, KEEP, group_size=GROUP, **pull, **kwargs
  )


def begin(workflow, seed=0):
  """A state whose actor has moved away from its reference."""
  state = workflow.init(jax.random.key(seed))
  other = workflow.init(jax.random.key(seed + 1)).actor.params
  params = jax.tree.map(lambda x, y: x + 0.1 * y, state.actor.params, other)
  return state._replace(actor=state.actor._replace(params=params))


@functools.cache
def eager(dtype, rows=8, **kwargs):
  """State and info of one eager step, its batch and its key."""
  workflow = grpo(dtype, **kwargs)
  # 6 + GROUP · LENGTH tokens, which the axis tensor divides.
  batch, key = tiny.problem(rows=rows, columns=6), jax.random.key(3)
  return workflow.step(begin(workflow), batch, key), batch, key


def agrees(dtype, place, micro_batch, **kwargs):
  """Asserts that a planned step equals the eager one up to rounding."""
  workflow = grpo(dtype, **{k: v for k, v in kwargs.items() if k != 'rows'})
  want, batch, key = eager(dtype, **kwargs)
  got = planned(workflow, begin(workflow), batch, key, place, micro_batch)
  same(got, want, TOLERANCE[dtype])


def planned(workflow, state, batch, key, place, rows):
  """State and info of one planned step."""
  flow = flow_lib.trace(workflow.step, state, batch, key)
  plan = plan_lib.one_place(flow.stages, tiny.PLACES[place], rows)
  runtime = local.LocalRuntime(plan, step=flow)
  in_memory.start(runtime, state)
  info = runtime.step(batch, key)
  return in_memory.state(runtime), info


def gradient(state):
  return optax.tree.get(state.actor.opt_state, 'trace')


def apart(got, want):
  """The largest ‖Δ‖/‖g‖ of any leaf."""
  leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  return max(
    float(np.linalg.norm(np.ravel(a - b)) / np.linalg.norm(np.ravel(b)))
    for a, b in jax.device_get(list(leaves))
  )


def same(got, want, tolerance):
  (state, info), (eager, expected) = got, want
  assert apart(gradient(state), gradient(eager)) <= tolerance
  numbers, rows = metrics.read(jax.device_get(info))
  expected_numbers, expected_rows = metrics.read(jax.device_get(expected))
  assert numbers.keys() == expected_numbers.keys()
  for name, number in expected_numbers.items():
    # A metric of a difference that is only rounding has no meaningful relative
    # error: on policy, lp − lp_b.
    near = 1e-6 if tolerance > 1e-6 else 1e-12
    np.testing.assert_allclose(
      numbers[name], number, rtol=tolerance, atol=near, err_msg=name
    )
  shown, expected = rows['rollout/samples'], expected_rows['rollout/samples']
  np.testing.assert_array_equal(shown['completion'], expected['completion'])


def cases(values, keep):
  """Pairs of a dtype and a value: those of `keep`, or all for `make claims`."""
  pairs = itertools.product(TOLERANCE, values)
  return claims.some(list(pairs), keep)


@pytest.mark.slow
@pytest.mark.parametrize(
  'dtype, pieces',
  cases([1, 2, 4, 8], [('float64', 4)]),
  indirect=['dtype'],
)
def test_micro_batches_change_only_rounding(dtype, pieces):
  names = ('generate', 'ref_logp', 'group_advantage', 'measure', 'gradient')
  agrees(dtype, 'one', dict.fromkeys(names, ROWS // pieces))


@pytest.mark.slow
@pytest.mark.parametrize(
  'dtype, place',
  cases(
    ['data', 'fsdp', 'mixed'],
    [('float64', 'fsdp')],  # All axes at once have a test below.
  ),
  indirect=['dtype'],
)
def test_meshes_change_only_rounding(dtype, place):
  agrees(dtype, place, {})


@pytest.mark.slow
@pytest.mark.parametrize(
  'dtype', claims.some(list(TOLERANCE), ['float64']), indirect=True
)
def test_meshes_and_micro_batches_together_change_only_rounding(dtype):
  agrees(dtype, 'mixed', {'gradient': 16}, rows=16, num_minibatches=2)


def drawn(policy, params, place, dtype):
  """Every token of a batch, sampled on a place."""
  del dtype
  act = functools.partial(policy.act, group_size=GROUP)
  generate = stages.Stage(act, 'generate', unbatched=(0,), group_size=GROUP)
  problem = jax.tree.map(lambda x: np.repeat(x, GROUP, 0), tiny.problem())

  def step(params, prompt, key):
    return params, generate(params, prompt, stages.keys(key, prompt))

  prompt, key = problem.prompt, jax.random.key(7)
  if place is None:
    return step(params, prompt, key)[1]
  flow = flow_lib.trace(step, params, prompt, key)
  plan = plan_lib.one_place(flow.stages, tiny.PLACES[place])
  runtime = local.LocalRuntime(plan, step=flow)
  in_memory.start(runtime, params)
  return jax.device_get(runtime.step(prompt, key))


def gap(policy, params, x, row, t):
  """The gap between the two largest perturbed logits of a row's token `t`."""
  model = policy.evaluate  # Log-probabilities of every token in turn.
  V = tiny.CONFIG.V
  action = np.repeat(np.asarray(x.action)[row : row + 1], V, 0)
  action[:, t] = np.arange(V)
  prompt = jax.tree.map(lambda p: np.repeat(p[row : row + 1], V, 0), x.obs)
  logp_V = np.asarray(model(params, prompt, action).logp)[:, t]
  key = stages.keys(jax.random.key(7), x.obs)[row]
  noise_V = jax.random.gumbel(jax.random.fold_in(key, t), (V,), logp_V.dtype)
  first, second = np.sort(logp_V + noise_V)[::-1][:2]
  return first - second


@pytest.mark.slow
@pytest.mark.parametrize(
  'dtype, place',
  cases(
    ['one', 'data', 'fsdp', 'mixed'],
    [('float64', 'mixed'), ('float32', 'mixed')],
  ),
  indirect=['dtype'],
)
def test_meshes_sample_the_same_tokens(dtype, place):
  policy = tiny.policy(dtype)
  params = policy.init(jax.random.key(5))
  want = drawn(policy, params, None, dtype)
  got = drawn(policy, params, place, dtype)
  differ = np.argwhere(np.asarray(got.action) != np.asarray(want.action))
  if dtype == 'float64':
    assert not differ.size
  for row in {row for row, _ in differ}:
    t = min(t for r, t in differ if r == row)
    assert gap(policy, params, want, row, t) < 1e-4


@pytest.mark.parametrize(
  'dtype, place',
  cases(['one', 'data', 'fsdp', 'mixed'], [('float64', 'mixed')]),
  indirect=['dtype'],
)
def test_slots_of_each_device_sample_the_tokens_of_a_static_batch(dtype, place):
  static, slotted = tiny.policy(dtype), tiny.policy(dtype, slots=3)
  params = static.init(jax.random.key(5))
  want = drawn(static, params, None, dtype)
  got = drawn(slotted, params, place, dtype)
  differ = np.argwhere(np.asarray(got.action) != np.asarray(want.action))
  if dtype == 'float64':
    assert not differ.size
    np.testing.assert_array_equal(got.truncated, want.truncated)
    np.testing.assert_allclose(got.logp, want.logp, rtol=0, atol=1e-9)
  for row in {row for row, _ in differ}:
    t = min(t for r, t in differ if r == row)
    assert gap(static, params, want, row, t) < 1e-4


@functools.cache
def compiled(dtype):
  """GRPO's loss and gradient as a jitted function of rows."""
  policy = tiny.policy(dtype)

  @jax.jit
  @jax.value_and_grad
  def compute(params, prompt, action, mask, advantage):
    logp = policy.evaluate(params, prompt, action, group_size=GROUP).logp
    return (-(logp * advantage * mask).sum(1) / mask.sum(1)).mean()

  return functools.partial(compute, policy.init(jax.random.key(0)))


def loss_and_gradient(dtype, problem, *rest):
  """GRPO's loss and gradient on given rows."""
  return compiled(dtype)(problem.prompt, *rest)


def rows(seed=0):
  rng = np.random.default_rng(seed)
  problem = jax.tree.map(lambda x: np.repeat(x, GROUP, 0), tiny.problem())
  action = rng.integers(1, tiny.CONFIG.V, (ROWS, tiny.LENGTH), np.int32)
  length = rng.integers(1, tiny.LENGTH + 1, (ROWS, 1))
  mask = (np.arange(tiny.LENGTH)[None] < length).astype(np.float32)
  return problem, action, mask, rng.normal(size=(ROWS, 1))


def padded(problem, left, right):
  def pad(x, fill):
    return np.pad(x, ((0, 0), (left, right)), constant_values=fill)

  prompt = problem.prompt
  return problem._replace(
    prompt=base.Prompt(pad(prompt.token, 9), pad(prompt.mask, 0))
  )


@pytest.mark.parametrize(
  'dtype, padding',
  cases([(3, 0), (0, 3), (2, 5)], [('float32', (2, 5)), ('float64', (2, 5))]),
  indirect=['dtype'],
)
def test_padding_changes_only_rounding(dtype, padding):
  problem, *rest = rows()
  value, grads = loss_and_gradient(dtype, problem, *rest)
  other = loss_and_gradient(dtype, padded(problem, *padding), *rest)
  np.testing.assert_allclose(other[0], value, rtol=TOLERANCE[dtype])
  assert apart(other[1], grads) <= TOLERANCE[dtype]


@pytest.mark.slow
def test_the_order_of_groups_changes_only_rounding(dtype):
  batch = rows()
  value, grads = loss_and_gradient(dtype, *batch)
  order = np.random.default_rng(1).permutation(ROWS // GROUP)
  order = (order[:, None] * GROUP + np.arange(GROUP)[None]).ravel()
  turned = jax.tree.map(lambda x: x[order], batch)
  other = loss_and_gradient(dtype, *turned)
  np.testing.assert_allclose(other[0], value, rtol=TOLERANCE[dtype])
  assert apart(other[1], grads) <= TOLERANCE[dtype]


@pytest.mark.slow
def test_a_rows_tokens_depend_on_its_key_alone():
  """They do not depend on the other rows of the batch."""
  policy = tiny.policy()
  params = policy.init(jax.random.key(0))
  problem = tiny.problem()
  keys = stages.keys(jax.random.key(1), problem.prompt)
  every = policy.act(params, problem.prompt, keys)
  some = jax.tree.map(lambda x: x[2:5], problem.prompt)
  few = policy.act(params, some, keys[2:5])
  np.testing.assert_array_equal(few.action, every.action[2:5])
  assert jnp.isfinite(few.logp).all()


# Micro-batches of parts of groups, by the devices that share their rows.
PARTS = {
  1: {'generate': 1, 'ref_logp': 2, 'gradient': 2},
  4: {'generate': 4, 'ref_logp': 8, 'gradient': 4},
}
# Place, the key of its micro-batches, and groups: each device or micro-batch
# has a part of one.
DIVIDED = [
  ('mixed', None, 1),
  ('one', 1, 2),
  ('data', None, 2),
  ('fsdp', None, 2),
  ('mixed', None, 2),
  ('mixed', 4, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['float32'], indirect=True)
@pytest.mark.parametrize(
  'place, parts, groups', claims.some(DIVIDED, DIVIDED[:1])
)
def test_dividing_groups_changes_only_rounding(dtype, place, parts, groups):
  agrees(dtype, place, PARTS.get(parts, {}), rows=groups)


@pytest.mark.claims
@pytest.mark.parametrize('dtype', ['float32'], indirect=True)
@pytest.mark.parametrize('how', [{'packed_tokens': 24}, {'slots': 2}])
@pytest.mark.parametrize('place, parts, groups', DIVIDED)
def test_dividing_groups_of_packed_rows_and_of_slots_changes_only_rounding(
  dtype, how, place, parts, groups
):
  policy = tiny.policy(dtype, **how)
  workflow = workflows.grpo(
    policy, even, KEEP, group_size=GROUP, kl_coef=1.0, kl_estimator=losses.kl_k2
  )
  batch, key = tiny.problem(rows=groups, columns=6), jax.random.key(3)
  want = workflow.step(begin(workflow), batch, key)
  micro_batch = PARTS.get(parts, {})
  got = planned(workflow, begin(workflow), batch, key, place, micro_batch)
  same(got, want, TOLERANCE[dtype])


@pytest.mark.claims
def test_xla_computes_a_wrong_gradient_of_groups_that_devices_share(
  monkeypatch,
):
  """The reason for `rules.local_group`: if this fails, whole groups are right.

  Then devices could share one reading of a prompt, if that were faster.
  """
  monkeypatch.setattr(rules, 'local_group', lambda group_size, rows: group_size)
  want, batch, key = eager('float32', rows=2)
  workflow = grpo('float32')

  def wrong(place):
    got, _ = planned(workflow, begin(workflow), batch, key, place, {})
    pairs = gradient(got), gradient(want[0])
    leaves = zip(
      *(jax.tree_util.tree_leaves_with_path(x) for x in pairs), strict=True
    )
    return {
      path[-1].key: apart(x, y)
      for (path, x), (_, y) in leaves
      if apart(x, y) > 1e-5
    }

  assert not wrong('data')
  assert not wrong('fsdp')
  assert wrong('mixed').keys() == {'embed_VD'}
  assert wrong('mixed')['embed_VD'] > 0.1
