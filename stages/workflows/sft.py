"""Supervised fine-tuning: maximum likelihood of worked examples."""

import jax.numpy as jnp
import optax

import stages
from stages import base, metrics
from stages.language import evaluate as evaluate_lib
from stages.language import policy_stages, verifiers
from stages.learn import losses, train_step


def sft(
  policy: base.Policy,
  verify: stages.Stage | None,
  optimizer: optax.GradientTransformation,
  *,
  evaluator: evaluate_lib.Evaluator = evaluate_lib.evaluate,
) -> base.Workflow:
  """Maximizes the likelihood of each token of the examples' completions.

    L = −Σ m lp / Σ m

  Args:
    policy: the language model to train.
    verify: stage `answer, action, mask -> base.Verdict`, which judges held-out
      problems, not a learned one; None to measure the likelihood of held-out
      examples instead.
    optimizer: optimizer of the parameters.
    evaluator: `policy, verify -> evaluate`, see `stages.language.evaluate`.

  Raises:
    ValueError: for a learned verifier.
  """
  verifiers.refuse_learned(verify)

  def loss(params, x: base.Example):
    logp_BT = token_logp(policy, params, x)
    mean = losses.token_mean(-logp_BT, x.mask)
    return (mean,), {'train/loss': mean, 'train/tokens': x.mask.sum()}

  learn = train_step.learner(loss, optimizer)
  score = stages.Stage(
    lambda params, x: likelihood(policy, params, x), 'score', 'sum', (0,)
  )
  evaluate_actor = verify and evaluator(policy, verify)

  def init(key):
    return train_step.init(policy.init(key), optimizer)

  def step(state: base.TrainState, examples: base.Example, key):
    del key  # Nothing here is random.
    return learn(state, [(examples,)])

  def evaluate(state: base.TrainState, batch, key):
    if verify is None:
      return score(state.params, batch)
    return evaluate_actor(train_step.version(state), batch, key)

  measure = 'eval/token_probability' if verify is None else 'eval/accuracy'
  return base.Workflow(
    init, step, evaluate, lambda state: state.params, score=measure
  )


def token_logp(policy: base.Policy, params, x: base.Example):
  """Log-probabilities of the tokens of completions, [B, T]; 0 on padding."""
  now = policy_stages.score(policy, params, x.prompt, x.action, x.mask)
  # Log-probabilities of padding are arbitrary, and ∞ · 0 is NaN.
  return jnp.where(x.mask > 0, now.logp, 0.0)


def likelihood(policy: base.Policy, params, x: base.Example) -> base.Info:
  """Mean loss and mean probability of the tokens of examples.

  The loss, −Σ m lp / Σ m, is the logarithm of the perplexity.
  """
  logp_BT = token_logp(policy, params, x)
  return {
    'eval/loss': losses.token_mean(-logp_BT, x.mask),
    'eval/token_probability': metrics.mean(jnp.exp(logp_BT), x.mask),
  }
