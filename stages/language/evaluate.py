"""Evaluation of a policy on held-out problems."""

from collections.abc import Callable

import stages
from stages import base, metrics
from stages.language import policy_stages


def evaluate(policy: base.Policy, verify: stages.Stage) -> Callable:
  """Returns `Version, problem, key -> info`: greedy answers, verified.

  Args:
    policy: the policy to evaluate.
    verify: `answer, action, mask -> base.Verdict`.
  """
  answer = policy_stages.act(policy, 'answer', greedy=True)

  @stages.stage('score', 'sum')
  def score(x: base.Experience, verdict: base.Verdict):
    length_B = x.mask.sum(1)
    return {
      'eval/accuracy': metrics.mean(verdict.correct),
      'eval/reward': metrics.mean(verdict.reward),
      'eval/response_length': metrics.histogram(length_B, x.mask.shape[1] + 1),
      'eval/truncated_fraction': metrics.mean(x.truncated),
      'eval/samples': metrics.first_rows(samples(x, verdict.reward), 4),
    }

  def run(actor: base.Version, problem: base.Problem, key):
    x = answer(actor, problem.prompt, stages.keys(key, problem.prompt))
    return score(x, verify(problem.answer, x.action, x.mask))

  return run


def samples(x: base.Experience, reward_B) -> dict:
  """Rows to log: prompts, completions and rewards."""
  return {
    'prompt': x.obs.token,
    'prompt_mask': x.obs.mask,
    'completion': x.action,
    'completion_mask': x.mask,
    'reward': reward_B,
  }
