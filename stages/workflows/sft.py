"""Supervised fine-tuning: maximum likelihood of worked examples."""

import optax

import stages
from stages import base
from stages.language import evaluate as evaluate_lib
from stages.learn import losses, train_step


def sft(
  policy: base.Policy,
  verify: stages.Stage,
  optimizer: optax.GradientTransformation,
) -> base.Workflow:
  """Maximizes the likelihood of each token of the examples' completions.

    L = −Σ m lp / Σ m

  Args:
    policy: the language model to train.
    verify: stage `answer, action, mask -> base.Verdict`, which judges held-out
      problems.
    optimizer: optimizer of the parameters.
  """

  def loss(params, x: base.Example):
    logp_BT = policy.evaluate(params, x.prompt, x.action).logp
    mean = losses.token_mean(-logp_BT, x.mask)
    return (mean,), {'train/loss': mean, 'train/tokens': x.mask.sum()}

  learn = train_step.learner(loss, optimizer)
  evaluate_actor = evaluate_lib.evaluate(policy, verify)

  def init(key):
    return train_step.init(policy.init(key), optimizer)

  def step(state: base.TrainState, examples: base.Example, key):
    del key  # Nothing here is random.
    return learn(state, [(examples,)])

  def evaluate(state: base.TrainState, problem: base.Problem, key):
    return evaluate_actor(train_step.version(state), problem, key)

  return base.Workflow(init, step, evaluate, lambda state: state.params)
