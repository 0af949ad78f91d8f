import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stages
from stages import base, metrics
from stages.language import evaluate
import tiny

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(('n', 'k'), [(4, 1), (5, 2), (6, 4), (5, 5)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, k):
  for right in range(n + 1):
    correct = np.float32([1] * right + [0] * (n - right))
    subsets = itertools.combinations(RNG.permutation(correct), k)
    share = np.mean([max(subset) for subset in subsets])
    got = evaluate.pass_at_k(jnp.asarray(correct), k)
    np.testing.assert_allclose(got, share, atol=1e-6)


def majority(correct, vote):
  """Whether the most frequent answer is right, by counting."""
  answers = [
    'right' if c else v
    for c, v in zip(correct, vote, strict=True)
    if c or v >= 0
  ]
  if not answers:
    return 0.0
  # `most_common` keeps the order of first appearance among equals.
  return float(collections.Counter(answers).most_common(1)[0][0] == 'right')


@pytest.mark.parametrize(('n', 'k'), [(4, 2), (7, 3), (8, 8)])
def test_maj_at_k_counts_answers(n, k):
  for _ in range(50):
    correct = RNG.integers(0, 2, n).astype(np.float32)
    # Right answers may be written differently, wrong ones may be missing.
    vote = np.where(correct, RNG.integers(5, 9, n), RNG.integers(-1, 3, n))
    runs = range(0, n - k + 1, k)
    want = np.mean(
      [majority(correct[i : i + k], vote[i : i + k]) for i in runs]
    )
    got = evaluate.maj_at_k(jnp.asarray(correct), jnp.asarray(vote), k)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_tie_goes_to_the_first_answer():
  correct, vote = jnp.float32([0, 1, 1, 0]), jnp.int32([3, 1, 2, 3])
  assert evaluate.maj_at_k(correct, vote, 4) == 0.0
  assert evaluate.maj_at_k(correct[::-1][1:], vote[::-1][1:], 3) == 1.0


@stages.stage('verify')
def is_even(answer_B, action_BT, mask_BT):
  right_B = (action_BT.sum(1) % 2 == answer_B).astype(jnp.float32)
  return base.Verdict(right_B, right_B, vote=action_BT[:, 0])


def evaluated(samples, weight=None, **settings):
  policy = tiny.policy()
  problem = tiny.problem(4)._replace(answer=jnp.zeros(4, int), weight=weight)
  version = base.Version(policy.init(jax.random.key(0)), jnp.int32(0))
  run = evaluate.evaluate(policy, is_even, samples=samples, **settings)
  info = jax.device_get(run(version, problem, jax.random.key(1)))
  return metrics.read(info)


def test_numbers_are_those_of_the_rows():
  weight = jnp.float32([1, 1, 1, 0])
  numbers, rows = evaluated(samples=4, weight=weight)
  rows = rows[evaluate.SAMPLES]
  correct_NG = rows['correct'].reshape(4, 4)[:3]
  np.testing.assert_allclose(
    numbers['eval/accuracy'], correct_NG.mean(), rtol=1e-6
  )
  error = correct_NG.mean(1).std(ddof=1) / 3**0.5
  np.testing.assert_allclose(numbers['eval/accuracy_stderr'], error, rtol=1e-5)
  best = correct_NG.max(1).mean()
  np.testing.assert_allclose(numbers['eval/pass_at_4'], best, rtol=1e-6)
  assert numbers['eval/pass_at_2'] <= numbers['eval/pass_at_4']
  assert {'eval/maj_at_2', 'eval/maj_at_4'} <= numbers.keys()
  assert rows['weight'].tolist() == [1] * 12 + [0] * 4


def test_samples_of_a_problem_differ_and_one_is_greedy():
  _, several = evaluated(samples=4)
  completions = several[evaluate.SAMPLES]['completion'].reshape(4, 4, -1)
  assert len({x.tobytes() for x in completions[0]}) > 1
  numbers, one = evaluated(samples=1)
  assert len(one[evaluate.SAMPLES]['completion']) == 4
  assert not any('_at_' in name for name in numbers)


def test_an_evaluation_may_have_a_temperature_of_its_own():
  cold, warm = (
    evaluated(samples=4, temperature=t)[1][evaluate.SAMPLES]['completion']
    for t in (1e-4, None)
  )
  _, greedy = evaluated(samples=1)
  likeliest = greedy[evaluate.SAMPLES]['completion'].repeat(4, axis=0)
  np.testing.assert_array_equal(cold, likeliest)
  assert (warm != likeliest).any()


def test_a_temperature_of_an_engine_is_given_to_it():
  given = []

  def act(params, prompt, key_B, *, temperature=None, **_):
    given.append(temperature)
    return tiny.policy().act(params, prompt, key_B)

  policy = tiny.policy()._replace(
    act=act, out_shapes=lambda *args: jax.eval_shape(tiny.policy().act, *args)
  )
  changed = evaluate._at_temperature(policy, 0.5)
  args = policy.init(jax.random.key(0)), tiny.problem(4).prompt
  changed.act(*args, jax.random.split(jax.random.key(1), 4))
  assert given == [0.5] and changed.sampling.temperature == 0.5


def test_a_temperature_of_greedy_completions_is_refused():
  with pytest.raises(ValueError, match='temperature 0.6 and takes the likelie'):
    evaluate.evaluate(tiny.policy(), is_even, temperature=0.6)


def test_greedy_samples_are_refused():
  with pytest.raises(ValueError, match='2 greedy completions'):
    evaluate.evaluate(tiny.policy(), is_even, samples=2, greedy=True)


@pytest.mark.parametrize('k', [2, 4])
def test_samples_that_failed_do_not_change_scores_of_the_others(k):
  rng = np.random.default_rng(k)
  for _ in range(20):
    kept = rng.permutation(np.float32([1] * 5 + [0] * 3))
    correct = rng.integers(0, 2, 8).astype(np.float32)
    vote = np.where(correct, 9, rng.integers(-1, 3, 8))
    of_all = (jnp.asarray(x) for x in (correct, vote, kept))
    of_kept = (jnp.asarray(x[kept > 0]) for x in (correct, vote))
    (c, v, kept_G), (c_kept, v_kept) = of_all, of_kept
    np.testing.assert_allclose(
      evaluate.pass_at_k(c, k, kept_G),
      evaluate.pass_at_k(c_kept, k),
      atol=1e-6,
    )
    np.testing.assert_allclose(
      evaluate.maj_at_k(c, v, k, kept_G),
      evaluate.maj_at_k(c_kept, v_kept, k),
      atol=1e-6,
    )


def evaluated_with_failures(failed, right, samples=2):
  """An evaluation by hand: rows of which some failed, and some are right."""

  def converse(policy, name, **_):
    del policy, name

    def run(actor, problem, key_B):
      del actor
      zero_BT = jnp.zeros((key_B.shape[0], 3))
      x = base.Experience(
        problem.prompt,
        zero_BT.astype(int),
        zero_BT,
        1.0 - jnp.tile(jnp.float32(failed)[:, None], 3),
        zero_BT[:, 0],
        env_failed=jnp.float32(failed),
      )
      return problem, x

    return run

  @stages.stage('verify')
  def verify(answer_B, action_BT, mask_BT):
    del answer_B, action_BT, mask_BT
    right_B = jnp.where(jnp.float32(failed) > 0, jnp.nan, jnp.float32(right))
    return base.Verdict(right_B, right_B, {'term': right_B})

  run = evaluate.evaluate(
    tiny.policy(), verify, samples=samples, greedy=False, converse=converse
  )
  version = base.Version((), jnp.int32(0))
  problem = tiny.problem(len(failed) // samples)
  return jax.device_get(run(version, problem, jax.random.key(0)))


def test_failed_environments_are_neither_right_nor_wrong():
  #      two right; one failed, one right; both failed; two wrong
  failed = [0, 0, 0, 1, 1, 1, 0, 0]
  info = evaluated_with_failures(failed, [1, 1, 1, 0, 0, 0, 0, 0])
  numbers, rows = metrics.read(info)
  assert numbers['eval/env_failed'] == 3
  assert info['eval/accuracy'].count == 3
  assert numbers['eval/accuracy'] == pytest.approx(2 / 3)
  assert info['eval/pass_at_2'].count == 2
  assert numbers['eval/pass_at_2'] == 0.5
  assert numbers['eval/reward'] == pytest.approx(0.6)
  assert numbers['eval/reward/term'] == pytest.approx(0.6)
  assert numbers['eval/response_length_mean'] == 3
  assert rows[evaluate.SAMPLES]['env_failed'].tolist() == failed
  # The interval is that of three problems, of which two are right.
  low, high = info['eval/accuracy'].interval()
  assert (low, high) == pytest.approx((0.2077, 0.9385), abs=1e-4)


def test_an_evaluation_of_failures_alone_has_no_score():
  numbers, _ = metrics.read(evaluated_with_failures([1] * 4, [0] * 4))
  assert numbers == {'eval/env_failed': 4.0}
