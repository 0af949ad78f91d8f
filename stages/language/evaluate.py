"""Evaluation of a policy on held-out problems."""

from collections.abc import Callable, Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp

import stages
from stages import base, metrics, ranges
from stages.language import policy_stages, verifiers

SAMPLES = 'eval/samples'  # Name in `info` of all rows: prompts and completions.

Evaluator = Callable[
  [base.Policy, stages.Stage | verifiers.LearnedVerifier], Callable
]
"""`policy, verify -> run`, as `evaluate`, whose `run` returns metrics."""


def evaluate(
  policy: base.Policy | Sequence[base.Policy],
  verify: stages.Stage,
  *,
  samples: ranges.PositiveInt = 1,
  greedy: bool | None = None,
  temperature: ranges.PositiveFloat | None = None,
  converse: Callable = policy_stages.one_turn,
) -> Callable:
  """Returns `Version, problem, key, params=() -> info`: metrics of answers.

  `params` are those of the verifier, if it is a learned one. `info` has the
  accuracy with its standard error, rewards, lengths, the share of completions
  that reached the length limit, and all rows. With several samples a problem it
  also has `pass_at_k` and, where the verifier knows final answers, `maj_at_k`,
  for k = 2, 4, 8, … up to `samples`, and for k = `samples`.

  Completions whose environment failed are neither right nor wrong: they are
  counted, and left out of all other metrics. A problem counts in an accuracy if
  one completion is left, and in `pass_at_k` and `maj_at_k` if k are.

  Args:
    policy: the policy to evaluate, or one for each role, as `converse` takes
      them; `run` then takes a Version of each.
    verify: `answer, action, mask -> base.Verdict`.
    samples: completions of each problem. Scores are averaged over those of a
      problem first, so the standard error is that of independent problems.
    greedy: takes the most likely tokens instead of samples; by default, if
      there is one completion a problem.
    temperature: divides the logits that samples are drawn from; None for that
      of the policy.
    converse: generates the rows: `policy_stages.one_turn`, a completion each,
      or `conversation.converse`, a conversation each.

  Raises:
    ValueError: for several greedy completions, which would all be the same, or
      a temperature of greedy ones.
  """
  greedy = samples == 1 if greedy is None else greedy
  if samples < 1 or (greedy and samples > 1):
    raise ValueError(
      f'An evaluation has {samples} {"greedy " * greedy}completions of each '
      'problem: give one greedy completion, or one or more samples.'
    )
  if temperature is not None:
    if greedy:
      raise ValueError(
        f'An evaluation has the temperature {temperature} and takes the '
        'likeliest tokens, which do not depend on it: give several samples '
        '(EVAL_SAMPLES in gin), or leave the temperature out.'
      )
    policy = (
      _at_temperature(policy, temperature)
      if isinstance(policy, base.Policy)
      else [_at_temperature(x, temperature) for x in policy]
    )
  if isinstance(policy, base.Policy):
    policy = policy._replace(replays_routing=False)  # Nothing is trained.
  repeat = policy_stages.repeat(samples)
  answer = converse(policy, 'answer', group_size=samples, greedy=greedy)
  score = stages.Stage(
    functools.partial(_score, samples), 'score', 'sum', group_size=samples
  )

  def run(actor: base.Version, problem: base.Problem, key, params=()):
    if samples > 1:
      problem = repeat(problem)
    problem, x = answer(actor, problem, stages.keys(key, problem.prompt))
    verdict = verifiers.judge(verify, params, problem.answer, x)
    rows = rows_to_log(x, verdict.reward) | {
      'correct': verdict.correct,
      'truncated': x.truncated,
    }
    if problem.weight is not None:
      rows['weight'] = problem.weight
    if x.env_failed is not None:
      rows['env_failed'] = x.env_failed
    return score(x, verdict, problem.weight) | {SAMPLES: metrics.Rows(rows)}

  return run


def _at_temperature(policy: base.Policy, temperature: float) -> base.Policy:
  """The policy, which samples at another temperature."""
  sampling = dataclasses.replace(policy.sampling, temperature=temperature)
  if policy.out_shapes is None:
    change = lambda f: f and functools.partial(f, sampling=sampling)
  else:
    change = lambda f: f and functools.partial(f, temperature=temperature)
  return policy._replace(
    act=change(policy.act), resume=change(policy.resume), sampling=sampling
  )


def pass_at_k(correct_G, k: int, kept_G=None):
  """Probability that at least one of k samples is right, arXiv:2107.03374.

    1 − C(n − c, k) / C(n, k)

  This is equation 1, an unbiased estimate from n samples of which c are right.

  Args:
    correct_G: 1 for right samples, 0 for wrong ones.
    k: at most n; of fewer samples the result is arbitrary, and finite.
    kept_G: 1 for the n samples that count; None for all.
  """
  kept_G = jnp.ones_like(correct_G) if kept_G is None else kept_G
  n, right = kept_G.sum(), (kept_G * correct_G).sum()
  i = jnp.arange(k)
  wrong_K = jnp.maximum(n - right - i, 0.0) / jnp.maximum(n - i, 1.0)
  return 1.0 - wrong_K.prod()


def maj_at_k(correct_G, vote_G, k: int, kept_G=None):
  """Probability that the most frequent answer of k samples is right.

  All right samples count as the same answer. Wrong samples agree if their ids
  are equal, and do not vote without an answer. Of equally frequent answers, the
  first wins. The estimate is the mean over disjoint runs of k samples, which is
  unbiased.

  Args:
    correct_G: 1 for right samples, 0 for wrong ones.
    vote_G: ids of their answers, −1 for none.
    k: at most n, the samples that count; of fewer, the result is 0.
    kept_G: 1 for samples that count; None for all.
  """
  runs = correct_G.shape[0] // k
  kept_G = jnp.ones_like(correct_G) if kept_G is None else kept_G
  order_G = jnp.argsort(kept_G <= 0, stable=True)  # Counted samples first.
  correct_G, vote_G = correct_G[order_G], vote_G[order_G]
  is_full_R = (1 + jnp.arange(runs)) * k <= kept_G.sum()

  def majority(correct_K, vote_K):
    same_KK = vote_K[:, None] == vote_K[None]
    same_KK |= (correct_K[:, None] * correct_K[None]) > 0
    votes_K = (vote_K >= 0) | (correct_K > 0)
    agreed_KK = same_KK & votes_K[:, None] & votes_K[None]
    return correct_K[agreed_KK.sum(1).argmax()]

  parts = (x[: runs * k].reshape(runs, k) for x in (correct_G, vote_G))
  right_R = jnp.where(is_full_R, jax.vmap(majority)(*parts), 0.0)
  return right_R.sum() / jnp.maximum(is_full_R.sum(), 1)


def _score(
  samples: int, x: base.Experience, verdict: base.Verdict, weight_B
) -> base.Info:
  """Metrics of an evaluation with `samples` completions a problem."""
  length_B, T = x.mask.sum(1), x.mask.shape[1]
  failures = {}
  weight_B = jnp.ones_like(length_B) if weight_B is None else weight_B
  kept_B = jnp.ones_like(length_B)
  if x.env_failed is not None:
    kept_B = (x.env_failed <= 0).astype(length_B.dtype)
    failures['eval/env_failed'] = (weight_B * (1.0 - kept_B)).sum()
    verdict = jax.tree.map(
      lambda x_B: jnp.where(kept_B > 0, x_B, 0), verdict._replace(turns=None)
    )
  weight_N = weight_B[::samples]
  weight_B = weight_B * kept_B
  kept_NG = kept_B.reshape(-1, samples)
  kept_N = kept_NG.sum(1)
  correct_NG = verdict.correct.reshape(-1, samples)
  accuracy_N = correct_NG.sum(1) / jnp.maximum(kept_N, 1.0)

  def score(x_N, k: int):
    return metrics.score(x_N, weight_N * (kept_N >= k))

  info = failures | {
    'eval/accuracy': score(accuracy_N, 1),
    'eval/reward': metrics.optional_mean(verdict.reward, weight_B),
    **verdict_terms(verdict, 'eval', weight_B),
    'eval/response_length': metrics.histogram(length_B, T + 1, weight_B),
    'eval/truncated_fraction': metrics.optional_mean(x.truncated, weight_B),
  }
  for k in _sizes(samples):
    passed = jax.vmap(functools.partial(pass_at_k, k=k))
    passed_N = passed(correct_NG, kept_G=kept_NG)
    info[f'eval/pass_at_{k}'] = score(passed_N, k)
    if verdict.vote is not None:
      majority = jax.vmap(functools.partial(maj_at_k, k=k))
      vote_NG = verdict.vote.reshape(-1, samples)
      right_N = majority(correct_NG, vote_NG, kept_G=kept_NG)
      info[f'eval/maj_at_{k}'] = score(right_N, k)
  return info


def _sizes(samples: int) -> list[int]:
  """2, 4, 8, … below `samples`, and `samples`; none for one sample."""
  powers = [2**i for i in range(1, samples.bit_length()) if 2**i < samples]
  return [*powers, samples] if samples > 1 else []


def verdict_terms(verdict: base.Verdict, split: str, mask_B) -> base.Info:
  """Metrics of the mean of each term of the reward, where `mask_B` is 1."""
  return {
    f'{split}/reward/{name}': metrics.optional_mean(term_B, mask_B)
    for name, term_B in dict(verdict.terms).items()
  }


def rows_to_log(x: base.Experience, reward_B) -> dict:
  """Prompts, completions and rewards of all rows, by name."""
  return {
    'prompt': x.obs.token,
    'prompt_mask': x.obs.mask,
    'completion': x.action,
    'completion_mask': x.mask,
    'reward': reward_B,
  }
