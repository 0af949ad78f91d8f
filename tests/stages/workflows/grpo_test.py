from concurrent import futures
import functools

import jax
import numpy as np
import optax
import pytest

import claims
import in_memory
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import local
import stages
from stages import base, metrics, workflows
from stages.learn import losses, optimizers
from tests.stages.workflows import grpo_cases
import tiny
from tiny import read

KEY = jax.random.key(0)


def problem(seed=0, worth=1):
  result = tiny.problem(seed=seed)
  return result._replace(answer=np.full_like(result.answer, worth))


def moved(state, other):
  """Distance between the actors' parameters."""
  return float(tiny.distance(state.actor.params, other.actor.params))


@pytest.mark.slow
def test_grpo_learns_what_a_verifier_on_the_host_rewards():
  workflow = grpo_cases.grpo()
  state = workflow.init(KEY)
  before = read(workflow.evaluate(state, problem(9), KEY))
  rewards = []
  for i in range(30):
    state, info = workflow.step(state, problem(i), jax.random.fold_in(KEY, i))
    rewards.append(read(info)['rollout/reward_mean'])
  after = read(workflow.evaluate(state, problem(9), KEY))
  assert rewards[0] < 0.6 < 0.9 < np.mean(rewards[-3:])
  assert before['eval/accuracy'] < 0.5 < 0.9 < after['eval/accuracy']


@pytest.mark.slow
def test_sft_learns_its_examples():
  workflow = workflows.sft(tiny.policy(), tiny.even, optimizers.adamw(1e-2))
  state, numbers = workflow.init(KEY), []
  for _ in range(40):
    state, info = workflow.step(state, tiny.examples(), KEY)
    numbers.append(read(info))
  first, last = numbers[0], numbers[-1]
  assert first['train/loss'] > 2.0
  # The length of an example is random; the token that it repeats is not.
  assert last['train/loss'] < 0.8
  assert {n['train/tokens'] for n in numbers} == {tiny.examples().mask.sum()}


@pytest.mark.slow
def test_rewards_that_are_all_alike_change_nothing():
  workflow = grpo_cases.grpo()
  state = workflow.init(KEY)
  after, info = workflow.step(state, problem(worth=0), KEY)
  assert moved(state, after) == 0
  numbers = read(info)
  assert numbers['rollout/groups_degenerate'] == 1
  assert numbers['train/grad_norm'] == numbers['train/policy_loss'] == 0
  assert after.actor.step == 1


@pytest.mark.slow
def test_a_first_update_is_on_policy():
  workflow = grpo_cases.grpo()
  _, info = workflow.step(workflow.init(KEY), problem(), KEY)
  numbers = read(info)
  # Decoding and scoring a token differ by rounding.
  np.testing.assert_allclose(numbers['train/ratio_mean'], 1.0, atol=1e-5)
  np.testing.assert_allclose(numbers['train/ratio_max'], 1.0, atol=1e-5)
  np.testing.assert_allclose(numbers['train/kl_behavior'], 0.0, atol=1e-9)
  assert numbers['train/clip_fraction'] == 0


@pytest.mark.slow
def test_a_step_is_a_function_of_its_state_its_batch_and_its_key():
  workflow = grpo_cases.grpo()
  state = workflow.init(KEY)
  same = [workflow.step(state, problem(), KEY) for _ in range(2)]
  tiny.assert_same_bits(*same)
  _, other = workflow.step(state, problem(), jax.random.key(1))
  one, two = (info['rollout/samples'].rows for info in (same[0][1], other))
  assert not np.array_equal(one['completion'], two['completion'])


@pytest.mark.slow
def test_an_evaluation_is_greedy():
  workflow = grpo_cases.grpo()
  state = workflow.init(KEY)
  one, two = (
    workflow.evaluate(state, problem(), jax.random.key(i)) for i in range(2)
  )
  tiny.assert_same_bits(one, two)


@pytest.mark.slow
def test_samples_are_whole_groups_for_people_to_compare():
  workflow = grpo_cases.grpo()
  _, info = workflow.step(workflow.init(KEY), problem(), KEY)
  shown = info['rollout/samples'].rows
  assert shown['completion'].shape == (8, 4)
  for prompt in shown['prompt']:
    np.testing.assert_array_equal(prompt, shown['prompt'][0])
  even = (shown['completion'] % 2 == 0) * shown['completion_mask']
  share = even.sum(1) / shown['completion_mask'].sum(1)
  np.testing.assert_allclose(shown['reward'], share, rtol=1e-6)


NAMES = """
  rollout/accuracy rollout/groups_degenerate rollout/padding
  rollout/response_length_max rollout/response_length_mean
  rollout/response_length_p95 rollout/reward_mean rollout/reward_std
  rollout/staleness rollout/staleness_max rollout/tokens
  rollout/truncated_fraction
  train/clip_fraction train/entropy train/grad_norm train/kl_behavior train/lr
  train/policy_loss train/ratio_max train/ratio_mean train/skipped
"""


@pytest.mark.slow
def test_the_names_of_metrics_are_stable():
  workflow = grpo_cases.grpo()
  _, info = workflow.step(workflow.init(KEY), problem(), KEY)
  assert sorted(read(info)) == NAMES.split()


@pytest.mark.slow
def test_the_kl_term_pulls_towards_the_reference_and_nowhere_else():
  workflow = grpo_cases.grpo(optax.sgd(0.02), kl_coef=1.0)
  state = workflow.init(KEY)
  first, _ = workflow.step(state, problem(worth=0), KEY)
  assert moved(state, first) < 1e-6  # There already.
  other = workflow.init(jax.random.key(1))
  params = jax.jit(optax.tree.add_scale)(
    state.actor.params, 0.1, other.actor.params
  )
  state = state._replace(actor=state.actor._replace(params=params))
  apart = []
  for _ in range(30):
    state, info = workflow.step(state, problem(worth=0), KEY)
    apart.append(read(info)['train/kl_reference'])
  assert apart[-1] < apart[0] / 4


@pytest.mark.slow
def test_planned_gspo_is_eager_gspo():
  workflow = workflows.grpo(
    tiny.policy(length=4),
    grpo_cases.count_even,
    optimizers.adamw(1e-2),
    group_size=8,
    num_minibatches=2,
    likelihood=losses.sequence_logp,
    clip_low=3e-4,
    clip_high=4e-4,
  )
  state = workflow.init(KEY)
  flow = flow_lib.trace(workflow.step, state, problem(), KEY)
  plan = plan_lib.parse(
    {
      'places': {p: {'devices': [i]} for i, p in enumerate('ab')},
      'stages': {'generate': 'a', '*': 'b'},
    },
    flow.stages,
  )
  runtime = local.LocalRuntime(plan, step=flow)
  in_memory.start(runtime, state)
  got = runtime.step(problem(), KEY)
  state, want = workflow.step(state, problem(), KEY)
  tiny.assert_same_bits((got, in_memory.state(runtime)), (want, state))
  assert read(want)['train/clip_fraction'] > 0
  runtime.close()


def _elsewhere(policy: base.Policy, off: float) -> base.Policy:
  """The policy as if an engine acted: on the host, log-probs `off` by that."""

  def act(*args, **kwargs):
    future = futures.Future()
    future.set_result(jax.device_get(policy.act(*args, **kwargs)))
    return stages.Deferred(
      future, lambda x: x._replace(logp=x.logp + np.float32(off) * x.mask)
    )

  like = functools.partial(jax.eval_shape, policy.act)
  return policy._replace(act=act, out_shapes=like)


@pytest.mark.slow
@pytest.mark.parametrize('make', [workflows.grpo, workflows.reinforce])
def test_a_policy_that_samples_on_the_host_learns_the_same_and_logs_the_gap(
  make,
):
  results = []
  for engine in (tiny.policy(), _elsewhere(tiny.policy(), -0.1)):
    workflow = make(engine, tiny.even_on_host, optax.sgd(0.1), group_size=4)
    state = workflow.init(KEY)
    results.append(workflow.step(state, tiny.problem(), KEY))
  (_, own), (_, far) = results
  gap = jax.device_get(far['rollout/logprob_gap_mean'].value()[''])
  np.testing.assert_allclose(gap, 0.1, rtol=1e-4)
  assert 'rollout/logprob_gap_mean' not in own
  # Every token weighs e^0.1 times as much.
  norms = [info['train/grad_norm'].value()[''] for info in (own, far)]
  np.testing.assert_allclose(norms[1] / norms[0], np.exp(0.1), rtol=1e-3)


def test_samples_are_corrected_where_they_are_rounded_or_of_older_parameters():
  dapo = functools.partial(workflows.dapo, max_rounds=2)
  for dtype, lag in (('float32', 0), ('float32', 1), ('bfloat16', 0)):
    for make in (workflows.grpo, dapo):
      workflow = make(
        tiny.policy(dtype),
        tiny.even,
        optimizers.adamw(1e-2),
        group_size=4,
        staleness=lag,
      )
      flow = tiny.trace(workflow, tiny.problem())
      names = [node.stage.name for node in flow.nodes]
      assert ('proximal_logp' in names) == bool(lag or dtype == 'bfloat16')


@pytest.mark.slow
def test_a_reference_in_bfloat16_takes_half_the_memory_and_changes_no_bit():
  policy = tiny.policy('bfloat16')
  workflows_of = [
    workflows.grpo(p, tiny.even, optax.sgd(0.1), group_size=4, kl_coef=0.1)
    for p in (policy, policy._replace(round_params=None))
  ]
  states = [workflow.init(KEY) for workflow in workflows_of]
  sizes = [sum(x.nbytes for x in jax.tree.leaves(s.reference)) for s in states]
  assert sizes[0] < 0.6 * sizes[1]
  one, other = (
    read(workflow.step(state, tiny.problem(), KEY)[1])
    for workflow, state in zip(workflows_of, states, strict=True)
  )
  assert one == other


@pytest.mark.slow
def test_a_step_in_bfloat16_logs_the_gap_between_decoding_and_scoring():
  workflow = workflows.grpo(
    tiny.policy('bfloat16'), tiny.even, optax.sgd(0.1), group_size=4
  )
  _, info = workflow.step(workflow.init(KEY), tiny.problem(), KEY)
  numbers = read(info)
  assert 0 < numbers['rollout/logprob_gap_mean'] < 0.05
  assert numbers['rollout/logprob_gap_max'] < 0.5
  # The ratio is to the trainer's own log-probabilities.
  np.testing.assert_allclose(numbers['train/ratio_max'], 1.0, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize('lag', claims.some([1, 2], [2]))
def test_a_stale_policy_samples_as_it_would_have_so_many_steps_ago(lag):
  fresh, late = (
    grpo_cases.grpo(optax.sgd(0.1)),
    grpo_cases.grpo(optax.sgd(0.1), staleness=lag),
  )
  state, versions = late.init(KEY), []
  for i in range(4):
    versions.append(state.actor.params)
    old = fresh.init(KEY)
    old = old._replace(
      actor=old.actor._replace(params=versions[max(0, i - lag)])
    )
    key = jax.random.key(i)
    _, want = fresh.step(old, problem(), key)
    state, info = late.step(state, problem(), key)
    # The older version samples, and the current one is updated.
    shown, expected = (
      metrics.read(jax.device_get(x))[1]['rollout/samples']['completion']
      for x in (info, want)
    )
    np.testing.assert_array_equal(shown, expected)
    assert read(info)['rollout/staleness'] == min(i, lag)
    assert read(info)['rollout/staleness_max'] == min(i, lag)
    # Ratios are to the version before the update, not to the one that sampled.
    np.testing.assert_allclose(read(info)['train/ratio_max'], 1.0, rtol=1e-5)
    assert (read(info)['rollout/logprob_gap_max'] > 1e-4) == (i > 0)
  assert moved(state, late.init(KEY)) > 0


@pytest.mark.slow
def test_the_entropy_bonus_raises_entropy():
  workflow = grpo_cases.grpo(optax.sgd(0.05), entropy_coef=1.0)
  state, entropies = workflow.init(KEY), []
  for _ in range(5):
    state, info = workflow.step(state, problem(worth=0), KEY)
    entropies.append(read(info)['train/entropy'])
  assert all(np.diff(entropies) > 0)
  assert entropies[-1] <= np.log(tiny.CONFIG.V)


@pytest.mark.slow
def test_a_second_minibatch_starts_from_the_first_ones_update():
  workflow = grpo_cases.grpo(optax.sgd(0.5), num_minibatches=2)
  state = workflow.init(KEY)
  after, info = workflow.step(state, problem(), KEY)
  assert after.actor.step == 2
  numbers = read(info)
  # On the first, the ratio is one; on the second it is not.
  assert numbers['train/ratio_max'] > 1.001
  assert numbers['train/kl_behavior'] > 1e-7


@pytest.mark.slow
@pytest.mark.parametrize('membership', ['row', 'shuffled', 'arrival'])
def test_epochs_reuse_a_batch_and_clip_around_the_sampling_policy(
  membership,
):
  workflow = grpo_cases.grpo(
    optax.sgd(0.5), num_minibatches=2, num_epochs=3, minibatch_by=membership
  )
  state, info = workflow.step(workflow.init(KEY), problem(), KEY)
  assert state.actor.step == 6
  numbers = read(info)
  assert numbers['train/ratio_max'] > 1.001
  assert numbers['train/kl_behavior'] > 1e-7
  # Its rows were drawn by the actor of the last step, not of an epoch ago.
  assert numbers['rollout/staleness'] == 0


@pytest.mark.slow
@pytest.mark.parametrize('membership', ['shuffled', 'arrival'])
def test_one_minibatch_is_the_batch(membership):
  plain, other = grpo_cases.grpo(), grpo_cases.grpo(minibatch_by=membership)
  tiny.assert_same_bits(
    *(w.step(w.init(KEY), problem(), KEY) for w in (plain, other))
  )


def test_no_copy_of_the_parameters_is_kept_without_a_kl_term():
  bare, pulled = (
    jax.eval_shape(grpo_cases.grpo(kl_coef=kl).init, KEY).reference
    for kl in (0.0, 0.1)
  )
  assert bare == ()
  assert jax.tree.structure(pulled) == jax.tree.structure(
    jax.eval_shape(tiny.policy().init, KEY)
  )


def test_a_group_of_one_is_refused():
  workflow = workflows.grpo(
    tiny.policy(), tiny.even, optax.sgd(1.0), group_size=1
  )
  with pytest.raises(ValueError, match='make groups of 2 or more'):
    tiny.trace(workflow, tiny.problem())


def test_minibatches_that_would_break_a_group_are_refused():
  workflow = grpo_cases.grpo(num_minibatches=3)
  with pytest.raises(
    ValueError,
    match='64 rows .* 3 mini.* groups of 8: .* 3 groups, .* 24 rows, or',
  ):
    tiny.trace(workflow, problem())


def test_the_parameters_of_a_workflow_are_its_policys():
  sft = workflows.sft(tiny.policy(), tiny.even, optimizers.adamw(1e-2))
  like = jax.tree.structure(jax.eval_shape(tiny.policy().init, KEY))
  for workflow in (grpo_cases.grpo(), grpo_cases.grpo(kl_coef=0.1), sft):
    state = jax.eval_shape(workflow.init, KEY)
    assert jax.tree.structure(workflow.params(state)) == like
