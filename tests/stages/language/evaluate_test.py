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


def evaluated(samples, weight=None):
  policy = tiny.policy()
  problem = tiny.problem(4)._replace(answer=jnp.zeros(4, int), weight=weight)
  version = base.Version(policy.init(jax.random.key(0)), jnp.int32(0))
  run = evaluate.evaluate(policy, is_even, samples=samples)
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


def test_greedy_samples_are_refused():
  with pytest.raises(ValueError, match='2 greedy completions'):
    evaluate.evaluate(tiny.policy(), is_even, samples=2, greedy=True)
