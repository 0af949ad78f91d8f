"""Supervised fine-tuning: maximum likelihood of worked examples."""

import jax.numpy as jnp
import optax

import stages
from stages import base, metrics, ranges
from stages.language import evaluate as evaluate_lib
from stages.language import policy_stages, rollout_metrics, verifiers
from stages.language.scoring import balance
from stages.learn import losses, objectives, train_step


def sft(
  policy: base.Policy,
  verify: stages.Stage | None,
  optimizer: optax.GradientTransformation,
  *,
  balance_coef: ranges.NonNegativeFloat = 0.0,
  evaluator: evaluate_lib.Evaluator = evaluate_lib.evaluate,
) -> base.Workflow:
  """Maximizes the likelihood of each token of the examples' completions.

    L = −Σ m lp / Σ m + c Σ m b / Σ m

  b is the balance of experts, see `stages.language.scoring.balance`.

  Args:
    policy: the language model to train.
    verify: stage `answer, action, mask -> base.Verdict`, which judges held-out
      problems, not a learned one; None to measure the likelihood of held-out
      examples instead.
    optimizer: optimizer of the parameters.
    balance_coef: c, weight of the balance; 0 without it.
    evaluator: `policy, verify -> evaluate`, see `stages.language.evaluate`.

  Raises:
    ValueError: for a learned verifier, and for a policy that does not sample
      from the whole distribution at temperature 1: its `evaluate` would score
      examples under another one.
  """
  verifiers.refuse_learned(verify)
  policy_stages.check_sampling(policy)

  balance.check(policy, balance_coef)

  def loss(params, x: base.Example):
    now = score_tokens(policy, params, x, balance_coef > 0)
    term_BT, info = objectives.balance_term(
      balance_coef, now, x.mask, losses.token_mean
    )
    mean = losses.token_mean(-now.logp, x.mask)
    info |= {'train/loss': mean, 'train/tokens': x.mask.sum()}
    return (losses.token_mean(term_BT - now.logp, x.mask),), info

  learn = train_step.learner(loss, optimizer)
  padding = rollout_metrics.example_padding(policy)
  score = stages.Stage(
    lambda params, x: likelihood(policy, params, x),
    'score',
    'sum',
    unbatched=(0,),
    rounds=policy.rounds,
  )
  evaluate_actor = verify and evaluator(policy, verify)

  def init(key):
    return train_step.init(policy.init(key), optimizer)

  def step(state: base.TrainState, examples: base.Example, key):
    del key  # Nothing here is random.
    state, info = learn(state, [(examples,)])
    return state, info | padding(examples)

  def evaluate(state: base.TrainState, batch, key):
    if verify is None:
      return score(state.params, batch)
    return evaluate_actor(train_step.version(state), batch, key)

  measure = 'eval/token_probability' if verify is None else 'eval/accuracy'
  return base.Workflow(
    init, step, evaluate, lambda state: state.params, score=measure
  )


def score_tokens(
  policy: base.Policy, params, x: base.Example, has_balance: bool = False
) -> base.Evaluation:
  """Scores of the tokens of completions, whose `logp` is 0 on padding."""
  now = policy_stages.score(
    policy, params, x.prompt, x.action, x.mask, balance=has_balance
  )
  # Log-probabilities of padding are arbitrary, and ∞ · 0 is NaN.
  return now._replace(logp=jnp.where(x.mask > 0, now.logp, 0.0))


def likelihood(policy: base.Policy, params, x: base.Example) -> base.Info:
  """Mean loss and mean probability of the tokens of examples.

  The loss, −Σ m lp / Σ m, is the logarithm of the perplexity.
  """
  logp_BT = score_tokens(policy, params, x).logp
  return {
    'eval/loss': losses.token_mean(-logp_BT, x.mask),
    'eval/token_probability': metrics.mean(jnp.exp(logp_BT), x.mask),
  }
