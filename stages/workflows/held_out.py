"""How a policy does on problems it did not train on."""

from collections.abc import Callable

from stages import base, metrics
from stages import stage as stages


def examine(policy: base.Policy, verify: stages.Stage) -> Callable:
  """Returns `params, problem, key -> info`, greedily.

  Args:
    policy: who answers.
    verify: `answer, action, mask -> base.Verdict`.
  """

  @stages.stage('answer', whole=(0,))
  def answer(params, prompt, key_B):
    return policy.act(params, prompt, key_B, greedy=True)

  @stages.stage('score', 'sum')
  def score(x: base.Experience, verdict: base.Verdict):
    length_B = x.mask.sum(1)
    return {
      'eval/accuracy': metrics.mean(verdict.correct),
      'eval/reward': metrics.mean(verdict.reward),
      'eval/response_length': metrics.histogram(length_B, x.mask.shape[1] + 1),
      'eval/truncated_fraction': metrics.mean(x.truncated),
      'eval/samples': metrics.first(show(x, verdict.reward), 4),
    }

  def evaluate(params, problem: base.Problem, key):
    x = answer(params, problem.prompt, stages.keys(key, problem.prompt))
    return score(x, verify(problem.answer, x.action, x.mask))

  return evaluate


def show(x: base.Experience, reward_B) -> dict:
  """What a person wants to see of some rows."""
  return {
    'prompt': x.obs.token,
    'prompt_mask': x.obs.mask,
    'completion': x.action,
    'completion_mask': x.mask,
    'reward': reward_B,
  }
