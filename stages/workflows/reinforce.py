"""REINFORCE with a group baseline: the smallest workflow, made to be copied."""

import jax.numpy as jnp
import optax

import stages
from stages.language import evaluate, policy_stages, rollout_metrics
from stages.learn import loss_terms, losses, rollout_correction, train_step


def reinforce(
  policy: stages.Policy,
  verify: stages.Stage,
  optimizer: optax.GradientTransformation,
  *,
  group_size: int,
) -> stages.Workflow:
  """Makes completions with rewards above their group's mean more likely.

  Aᵢ = Rᵢ − mean R,   L = −Σ m w A lp / Σ m,   w as in `objectives.policy`

  Args:
    policy: the language model to train.
    verify: stage `answer, action, mask -> stages.Verdict`.
    optimizer: optimizer of the parameters.
    group_size: completions of each prompt.
  """

  def loss(params, x: stages.Experience):
    logp_BT = policy_stages.scorer(policy, group_size)(params, x).logp
    loss_BT = losses.reinforce(jnp.where(x.mask > 0, logp_BT, 0.0), x.advantage)
    loss_BT = rollout_correction.weigh(loss_BT, loss_terms.Importance(), x)
    mean = losses.token_mean(loss_BT, x.mask)
    return (mean,), {'train/policy_loss': mean}

  @stages.stage('group_advantage', group_size=group_size)
  def group_advantage(reward_B, mask_BT):
    reward_NG = reward_B.reshape(-1, group_size)
    advantage_NG = reward_NG - reward_NG.mean(1, keepdims=True)
    return advantage_NG.reshape(-1, 1) * mask_BT

  repeat = policy_stages.repeat(group_size)
  generate = policy_stages.act(policy, 'generate', group_size=group_size)
  rescore = policy_stages.proximal_logp(policy, group_size)
  measure = rollout_metrics.measure(group_size, updates_per_step=1)
  learn = train_step.learner(loss, optimizer, group_size=group_size)
  test = evaluate.evaluate(policy, verify)
  init = lambda key: train_step.init(policy.init(key), optimizer)

  def step(state: stages.TrainState, problem: stages.Problem, key):
    actor, problem = train_step.version(state), repeat(problem)
    x = generate(actor, problem.prompt, stages.keys(key, problem.prompt))
    x = rescore(actor, x)
    verdict = verify(problem.answer, x.action, x.mask)
    rollout_info = measure(x, verdict, state.step)
    x = x._replace(advantage=group_advantage(verdict.reward, x.mask))
    state, info = learn(state, [(x,)])
    return state, rollout_info | info

  return policy_stages.workflow(init, step, train_step.version, test)
