"""DAPO: batches of groups that say something, and what overlong rows cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import claims
import in_memory
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import flows, local
from stages import base, metrics, workflows
from stages.language import partial_rollout, rollout_metrics
from stages.learn import losses, optimizers
from stages.workflows.dapo import (
  _accept,
  _describe,
  _round_prompts,
  Accepted,
  overlong,
)
from tests.rlinf_jax.runtime.plans import invariance_test
from tests.stages.language import partial_rollout_test
import tiny
from tiny import read

KEY = jax.random.key(0)
GROUP = 4


@pytest.mark.parametrize(
  'length, cost', [(0, 0), (12, 0), (14, -0.25), (16, -0.5), (20, -1)]
)
def test_overlong_costs_rise_to_one(length, cost):
  penalty = overlong(jnp.float32([length]), limit=20, buffer=8)
  np.testing.assert_allclose(penalty, [cost])


def none_of(N):
  x = base.Experience(
    obs=jnp.full(N * 2, -1),
    action=jnp.zeros((N * 2, 1), jnp.int32),
    logp=jnp.zeros((N * 2, 1)),
    mask=jnp.zeros((N * 2, 1)),
    truncated=jnp.zeros(N * 2),
  )
  zero = jnp.zeros(())
  none = jnp.int32(0)
  verdict = base.Verdict(jnp.zeros(N * 2), jnp.zeros(N * 2))
  return Accepted(x, verdict, none, none, metrics.Mean(zero, zero))


def drawn(name, correct_B):
  B = len(correct_B)
  obs_B = 100 * name + jnp.arange(B)
  one_B1 = jnp.ones((B, 1))
  x = base.Experience(obs_B, one_B1.astype(int), one_B1, one_B1, one_B1[:, 0])
  correct_B = jnp.float32(correct_B)
  return x, base.Verdict(correct_B, correct_B), {}


def test_groups_of_mixed_accuracy_are_accepted_in_order():
  accept = functools.partial(_accept, 2)
  accepted, done = accept(none_of(3), *drawn(1, [0, 0, 1, 0, 1, 1]))
  assert (int(accepted.filled), bool(done)) == (1, False)
  assert accepted.x.obs.tolist() == [102, 103, -1, -1, -1, -1]
  accepted, done = accept(accepted, *drawn(2, [0, 1, 1, 0, 0, 1]))
  assert (int(accepted.filled), bool(done)) == (3, True)
  assert accepted.x.obs.tolist() == [102, 103, 200, 201, 202, 203]
  assert accepted.verdict.correct.tolist() == [1, 0, 0, 1, 1, 0]
  # All that was drawn counts.
  assert accepted.accuracy.value()[''] == pytest.approx(6 / 12)
  assert int(accepted.round) == 2


def test_groups_without_a_token_are_neither_kept_nor_counted():
  x, verdict, info = drawn(1, [0, 1, 0, 1, 0, 1])
  x = x._replace(mask=x.mask.at[2:4].set(0.0))
  accepted, _ = _accept(2, none_of(3), x, verdict, info)
  assert accepted.x.obs.tolist() == [100, 101, 104, 105, -1, -1]
  assert accepted.accuracy.value()[''] == pytest.approx(2 / 4)


def test_environments_that_failed_count_also_in_groups_that_are_not_kept():
  x, *given = drawn(1, [0, 0, 0, 1])
  failed_B, zero_B1 = jnp.float32([1, 0, 0, 0]), jnp.zeros((4, 1), jnp.int32)
  x = x._replace(
    obs=base.Prompt(zero_B1, zero_B1 + 1),
    mask=1.0 - failed_B[:, None],
    version=zero_B1,
    env_failed=failed_B,
  )
  none = jax.tree.map(jnp.zeros_like, x)
  accepted = none_of(2)._replace(x=none, info=rollout_metrics.failures(none))
  for _ in range(2):
    accepted, done = _accept(2, accepted, x, *given)
  assert done and read(_describe(2, 1, accepted, 0))['rollout/env_failed'] == 2


@pytest.mark.parametrize('seed', range(5))
def test_filling_is_the_first_mixed_groups_of_all_rounds(seed):
  rng = np.random.default_rng(seed)
  accepted, all_, done = none_of(4), [], False
  for i in range(4):
    if done:
      break
    correct_B = rng.integers(2, size=8)
    accepted, done = _accept(2, accepted, *drawn(i, correct_B))
    all_ += [
      100 * i + 2 * g + j
      for g in range(4)
      if correct_B[2 * g] != correct_B[2 * g + 1]
      for j in range(2)
    ]
  want = (all_ + [-1] * 8)[:8]
  assert accepted.x.obs.tolist() == want
  np.testing.assert_array_equal(accepted.x.mask[:, 0], np.array(want) >= 0)


def test_a_rows_key_is_of_its_round_too():
  ask = functools.partial(_round_prompts, 2, GROUP)
  rows = [ask(tiny.problem(8), KEY, jnp.int32(i)) for i in range(2)]
  key_B = np.concatenate([jax.random.key_data(keys) for _, keys in rows])
  assert len({tuple(key) for key in key_B.tolist()}) == 8 * GROUP
  answer_B = np.concatenate([problem.answer for problem, _ in rows])
  np.testing.assert_array_equal(answer_B, np.repeat(np.arange(8), GROUP))


def test_prompts_that_rounds_cannot_share_are_refused():
  with pytest.raises(ValueError, match='8 prompts .* 3 rounds'):
    _round_prompts(3, GROUP, tiny.problem(8), KEY, jnp.int32(0))


@functools.cache
def dapo(dtype='float32', rounds=2, **kwargs):
  return workflows.dapo(
    tiny.policy(dtype),
    invariance_test.even if dtype == 'float64' else tiny.even,
    optimizers.adamw(1e-2),
    group_size=GROUP,
    max_rounds=rounds,
    **kwargs,
  )


@pytest.mark.slow
def test_a_batch_of_groups_that_are_all_alike_teaches_nothing():
  workflow = workflows.dapo(
    tiny.policy(), never, optimizers.adamw(1e-2), group_size=GROUP, max_rounds=2
  )
  state = workflow.init(KEY)
  after, info = workflow.step(state, tiny.problem(), KEY)
  tiny.assert_same_bits(after.actor.params, state.actor.params)
  numbers = read(info)
  assert numbers['rollout/rounds'] == 2
  assert numbers['rollout/groups_filled'] == 0
  assert numbers['rollout/accuracy'] == 0
  assert np.isfinite(numbers['train/policy_loss'])


@tiny.stages.stage('reward')
def never(answer, action, mask):
  del answer, mask
  zero_B = jnp.zeros(action.shape[0])
  return base.Verdict(zero_B, zero_B)


@tiny.stages.stage('reward')
def mixed(answer, action, mask):
  """Rewards even tokens; each other row of a group is right."""
  reward_B = invariance_test.even.fn(answer, action, mask).reward
  return base.Verdict(reward_B, jnp.arange(len(reward_B)) % 2 + 0.0 * reward_B)


@pytest.mark.slow
@pytest.mark.parametrize('kl', ['kl_coef', 'kl_reward_coef'])
def test_dapo_whose_groups_are_all_mixed_is_grpo(kl, in_float64):
  parts = tiny.policy('float64'), mixed, invariance_test.KEEP
  settings = {
    'group_size': GROUP,
    'clip_high': 0.28,
    'num_minibatches': 2,
    kl: 0.5,
  }
  dapo = workflows.dapo(*parts, max_rounds=1, **settings)
  grpo = workflows.grpo(
    *parts,
    aggregate=losses.token_mean,
    minibatch_by='shuffled',
    **settings,
  )
  states = []
  for workflow in (dapo, grpo):
    state = invariance_test.begin(workflow)  # Apart from its reference.
    for i in range(2):
      problem, key = tiny.problem(seed=i), jax.random.key(i)
      state, info = workflow.step(state, problem, key)
    assert read(info)['train/kl_reference'] > 0.01
    states.append(state)
  for one, other in zip(*map(jax.tree.leaves, states), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@functools.cache
def partial_dapo(**kwargs):
  """Rounds of four groups, two of which may be left to the next round."""
  return workflows.dapo(
    partial_rollout_test.policy(length=12),
    tiny.even,
    optax.sgd(0.0),
    group_size=GROUP,
    max_rounds=2,
    num_minibatches=1,
    rollouts=functools.partial(
      partial_rollout.partial_rollouts, max_carry=2, extra_groups=2
    ),
    **kwargs,
  )


def rounds_of_partial_rollouts(length_NG, correct_NG, mixed_wanted):
  """Computes the groups that steps learn from, and their rounds, in NumPy.

  Every step has new groups for two rounds of four. A round decodes all groups
  in flight until at most two of them are unfinished, and none of those that
  have been carried twice; four finished ones leave it, the oldest first.
  """
  carried, steps = [], []
  for start in range(0, len(length_NG), 8):
    kept, rounds = [], 0
    while rounds < 2 and len(kept) < mixed_wanted:
      new = [[start + 4 * rounds + n, 0, 0] for n in range(4)]
      carried = carried or [[None, 0, 0]] * 2
      groups = [list(group) for group in carried + new]

      def left(group):
        name, drawn, _ = group
        return 0 if name is None else max(length_NG[name].max() - drawn, 0)

      ticks = 0
      while True:
        open_ = [group for group in groups if left(group) > ticks]
        if len(open_) <= 2 and all(age < 2 for *_, age in open_):
          break
        ticks += 1
      is_done = [left(group) <= ticks for group in groups]
      done = [i for i, x in enumerate(is_done) if x][:4]
      for i in done:
        name = groups[i][0]
        if name is not None and len({*correct_NG[name]}) > 1:
          kept.append(name)
      carried = [
        [name, drawn + ticks, age + 1]
        for i, (name, drawn, age) in enumerate(groups)
        if i not in done
      ]
      rounds += 1
    steps.append((kept[:mixed_wanted], rounds))
  return steps


@pytest.mark.slow
def test_rounds_leave_unfinished_groups_to_later_rounds_and_steps():
  """With frozen parameters, tokens are those of whole completions."""
  workflow, policy = partial_dapo(), partial_rollout_test.policy(length=12)
  batches = [tiny.problem(rows=8, seed=i) for i in range(5)]
  state = flows.first_state(workflow, KEY, batches[0])
  rows = []
  for i, batch in enumerate(batches):
    prompt = jax.tree.map(lambda x: np.repeat(x, GROUP, 0), batch.prompt)
    key_B = tiny.stages.keys(jax.random.key(i), prompt)
    params = state.actor.params
    rows.append(policy.act(params, prompt, key_B, group_size=GROUP))
  whole = jax.tree.map(lambda *x: np.concatenate(x), *rows)
  correct = tiny.even(0, whole.action, whole.mask).correct
  want = rounds_of_partial_rollouts(
    whole.mask.sum(1).reshape(-1, GROUP),
    np.array(correct).reshape(-1, GROUP),
    4,
  )
  continued = 0
  for i, batch in enumerate(batches):
    state, info = workflow.step(state, batch, jax.random.key(i))
    numbers, (kept, rounds) = read(info), want[i]
    assert numbers['rollout/rounds'] == rounds
    assert numbers['rollout/groups_filled'] == len(kept) / 4
    assert numbers['rollout/groups_degenerate'] == 0
    ids = np.add.outer(np.array(kept) * GROUP, np.arange(GROUP)).ravel()
    assert numbers['rollout/tokens'] == whole.mask[ids].sum()
    shown = metrics.read(jax.device_get(info))[1]['rollout/samples']
    np.testing.assert_array_equal(
      shown['completion'], whole.action[ids[: len(shown['completion'])]]
    )
    continued += numbers['rollout/continued_fraction'] > 0
  assert continued


@pytest.mark.slow
def test_dapo_learns():
  workflow = dapo()
  state, accuracies, rounds = workflow.init(KEY), [], []
  for i in range(30):
    key = jax.random.fold_in(KEY, i)
    state, info = workflow.step(state, tiny.problem(seed=i), key)
    accuracies.append(read(info)['rollout/accuracy'])
    rounds.append(read(info)['rollout/rounds'])
    assert read(info)['rollout/groups_degenerate'] == 0
  assert np.mean(accuracies[:3]) < 0.75 < 0.9 < np.mean(accuracies[-3:])
  assert set(rounds) == {1, 2}


@pytest.mark.slow
def test_a_stale_policy_samples_as_it_would_have_a_step_ago():
  fresh, late = dapo(), dapo(staleness=1)
  state, before = late.init(KEY), None
  for i in range(3):
    old = fresh.init(KEY)
    params = state.actor.params if before is None else before
    old = old._replace(actor=old.actor._replace(params=params))
    before, key = state.actor.params, jax.random.key(i)
    _, want = fresh.step(old, tiny.problem(), key)
    state, info = late.step(state, tiny.problem(), key)
    # The older version samples, and the current one is updated.
    shown, expected = (
      metrics.read(jax.device_get(x))[1]['rollout/samples']['completion']
      for x in (info, want)
    )
    np.testing.assert_array_equal(shown, expected)
    assert read(info)['rollout/staleness'] == min(i, 1)
    # Ratios are to the version before the update, not to the one that sampled.
    np.testing.assert_allclose(read(info)['train/ratio_max'], 1.0, rtol=1e-5)
    assert (read(info)['rollout/logprob_gap_max'] > 1e-4) == (i > 0)


PLANS = {
  'one place': ({}, True),
  'places': (
    {
      'places': {p: {'devices': [i]} for i, p in enumerate('abc')},
      'stages': {
        'generate': 'a',
        'round_prompts': 'a',
        'reward': 'b',
        '*': 'c',
      },
    },
    True,
  ),
  'pieces and a mesh': (
    {
      'places': {
        'a': {'devices': [0]},
        'b': {'devices': [1, 2], 'axes': [['fsdp', 2]]},
      },
      'stages': {'generate': 'a', '*': 'b'},
      'pieces': 2,
    },
    False,
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', claims.some(PLANS, ['places', 'pieces and a mesh'])
)
def test_planned_dapo_is_eager_dapo(name, in_float64):
  sketch, exact = PLANS[name]
  workflow = dapo(
    'float64',
    num_minibatches=2,
    num_epochs=2,
    overlong_buffer=2,
    staleness=int(name == 'places'),
  )
  state = workflow.init(KEY)
  flow = flow_lib.trace(workflow.step, state, tiny.problem(), KEY)
  runtime = local.LocalRuntime(plan_lib.parse(sketch, flow.stages), step=flow)
  in_memory.start(runtime, state)
  rounds = []
  for i in range(3):
    batch, key = tiny.problem(seed=i), jax.random.key(i)
    got = runtime.step(batch, key)
    state, want = workflow.step(state, batch, key)
    rounds.append(read(want)['rollout/rounds'])
    for one, other in ((got, want), (in_memory.state(runtime), state)):
      if exact:
        tiny.assert_same_bits(one, other)
        continue
      one, other = tiny.arrays(one), tiny.arrays(other)
      for name, x in other.items():
        scale = max(1.0, float(np.abs(x).max(initial=0)))
        np.testing.assert_allclose(
          one[name], x, rtol=1e-9, atol=1e-9 * scale, err_msg=name
        )
  if not workflow.staleness:
    assert len({*rounds}) > 1  # Some batches were full at once.
  runtime.close()
