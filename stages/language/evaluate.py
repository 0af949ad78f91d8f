"""Evaluation of a policy on held-out problems."""

from collections.abc import Callable

import stages
from stages import base, metrics
from stages.language import policy_stages, verifiers


def evaluate(policy: base.Policy, verify: stages.Stage) -> Callable:
  """Returns `Version, problem, key, params=() -> info`: verified answers.

  They are greedy. `params` are those of the verifier, if it is a learned one.

  Args:
    policy: the policy to evaluate.
    verify: `answer, action, mask -> base.Verdict`.
  """
  answer = policy_stages.act(policy, 'answer', greedy=True)

  @stages.stage('score', 'sum')
  def score(x: base.Experience, verdict: base.Verdict, weight_B):
    length_B, T = x.mask.sum(1), x.mask.shape[1]
    return {
      'eval/accuracy': metrics.mean(verdict.correct, weight_B),
      'eval/reward': metrics.mean(verdict.reward, weight_B),
      **verdict_terms(verdict, 'eval', weight_B),
      'eval/response_length': metrics.histogram(length_B, T + 1, weight_B),
      'eval/truncated_fraction': metrics.mean(x.truncated, weight_B),
      'eval/samples': metrics.first_rows(samples(x, verdict.reward), 4),
    }

  def run(actor: base.Version, problem: base.Problem, key, params=()):
    x = answer(actor, problem.prompt, stages.keys(key, problem.prompt))
    verdict = verifiers.judge(verify, params, problem.answer, x)
    return score(x, verdict, problem.weight)

  return run


def verdict_terms(verdict: base.Verdict, split: str, mask_B=None) -> base.Info:
  """The mean of each term of the reward, where `mask_B` is one."""
  return {
    f'{split}/reward/{name}': metrics.mean(term_B, mask_B)
    for name, term_B in dict(verdict.terms).items()
  }


def samples(x: base.Experience, reward_B) -> dict:
  """Rows to log: prompts, completions and rewards."""
  return {
    'prompt': x.obs.token,
    'prompt_mask': x.obs.mask,
    'completion': x.action,
    'completion_mask': x.mask,
    'reward': reward_B,
  }
