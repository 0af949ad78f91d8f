"""Supervised fine-tuning: learning to imitate worked examples."""

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

  Args:
    policy: the model to train.
    verify: how the held-out problems are judged: `answer, action, mask ->
      base.Verdict`.
    optimizer: how gradients become updates.
  """

  def loss(params, x: base.Example):
    logp_BT = policy.evaluate(params, x.prompt, x.action).logp
    mean = losses.token_mean(-logp_BT, x.mask)
    return (mean,), {'train/loss': mean, 'train/tokens': x.mask.sum()}

  gradient = stages.Stage(
    train_step.gradient(loss), 'gradient', 'sum', unbatched=(0,)
  )
  apply = stages.Stage(train_step.apply(optimizer), 'apply', 'batch')
  examine = evaluate_lib.evaluate(policy, verify)

  def init(key):
    return train_step.init(policy.init(key), optimizer)

  def step(state: base.TrainState, examples: base.Example, key):
    del key  # Nothing here is random.
    return apply(state, gradient(state.params, examples))

  def evaluate(state: base.TrainState, problem: base.Problem, key):
    now = base.Version(state.params, state.step)
    return examine(now, problem, key)

  return base.Workflow(init, step, evaluate, lambda state: state.params)
