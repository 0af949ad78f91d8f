"""GRPO with a policy of its own for each role of an episode."""

from collections.abc import Callable, Sequence
import functools
from typing import NamedTuple

import jax
import optax

import stages
from stages import base, metrics, ranges
from stages.language import (
  advantage_stages,
  conversation,
  policy_stages,
  policy_update,
  rollout_metrics,
  verifiers,
)
from stages.language import evaluate as evaluate_lib
from stages.language.conversation import roles as roles_lib
from stages.learn import (
  advantages,
  loss_terms,
  losses,
  minibatches,
  objectives,
  rollout_correction,
  signatures,
  train_step,
)


class State(NamedTuple):
  """State carried from step to step.

  Attributes:
    learners: what the policy of each role learns with.
    verifier: parameters of a learned verifier; `()` for others.
  """

  learners: tuple[policy_update.Learner, ...]
  verifier: base.Params = ()


def role_grpo(
  policies: Sequence[base.Policy],
  verify: stages.Stage | verifiers.LearnedVerifier,
  optimizers: Sequence[optax.GradientTransformation],
  *,
  envs: conversation.TextEnvs,
  max_turns: ranges.PositiveInt,
  group_size: ranges.PositiveInt,
  expected_turns: ranges.PositiveInt | None = None,
  clip_low: ranges.NonNegativeFloat = 0.2,
  clip_high: ranges.NonNegativeFloat = 0.2,
  dual_clip: ranges.AboveOne | None = None,
  kl_coef: ranges.NonNegativeFloat = 0.0,
  kl_estimator: signatures.KlEstimator = losses.kl_k3,
  kl_reward_coef: ranges.NonNegativeFloat = 0.0,
  kl_to_go: bool = False,
  entropy_coef: float = 0.0,
  balance_coef: ranges.NonNegativeFloat = 0.0,
  num_minibatches: ranges.PositiveInt = 1,
  num_epochs: ranges.PositiveInt = 1,
  minibatch_by: minibatches.MinibatchBy = 'row',
  staleness: ranges.NonNegativeInt = 0,
  advantage: signatures.GroupAdvantage = advantages.group_relative,
  turn_advantage: signatures.TurnAdvantage | None = None,
  normalize_advantages: bool = False,
  mask_truncated: bool = False,
  policy_loss: signatures.PolicyLoss = losses.ppo_clip,
  likelihood: signatures.Likelihood = losses.token_logp,
  aggregate: signatures.Aggregate = losses.sequence_mean_token_mean,
  importance_weight: signatures.ImportanceWeight = losses.token_weight,
  importance_bound: signatures.ImportanceBound = losses.truncated,
  importance_cap: ranges.AtLeastOne = 2.0,
  eval_samples: ranges.PositiveInt = 1,
  eval_greedy: bool | None = None,
) -> base.Workflow:
  """GRPO of several policies that play the roles of one episode together.

  Each policy learns from the rows of its role alone, by its own rewards, whose
  baseline are the rewards of the same role of the same problem, as
  arXiv:2602.08847 does for agents with models of their own. `grpo` with the
  same environments trains one policy in all roles.

  Args:
    policies: the policy of each role, in the order of the environments' roles,
      with the same tokenizer and `response_length`.
    verify: as in `grpo`, such as `conversation.episode_return()`.
    optimizers: the optimizer of each policy.
    envs: environments with roles.
    max_turns: turns of each role, as in `conversation.converse`.
    group_size: episodes of each problem.
    expected_turns: turns that planners count on; `max_turns` if None.
    clip_low: as in `grpo`.
    clip_high: likewise.
    dual_clip: likewise.
    kl_coef: likewise; the reference of a policy are its own initial parameters.
    kl_estimator: likewise.
    kl_reward_coef: likewise.
    kl_to_go: likewise.
    entropy_coef: likewise.
    balance_coef: likewise; 0 unless all policies have experts.
    num_minibatches: minibatches of the rows of a role, one update each.
    num_epochs: passes over them.
    minibatch_by: as in `grpo`; shuffled minibatches of all roles have the same
      problems.
    staleness: as in `grpo`, of all policies.
    advantage: likewise.
    turn_advantage: likewise.
    normalize_advantages: likewise, over the rows of each role.
    mask_truncated: likewise.
    policy_loss: likewise.
    likelihood: likewise.
    aggregate: likewise.
    importance_weight: likewise.
    importance_bound: likewise.
    importance_cap: likewise.
    eval_samples: as `samples` in `evaluate`.
    eval_greedy: as `greedy` in `evaluate`.

  Raises:
    ValueError: if there is not one policy and one optimizer for each role, for
      a KL term and a KL penalty at once, for `kl_to_go` without a penalty, or
      for a `balance_coef` of a policy without experts.
  """
  _check(policies, optimizers, envs)
  has_kl = loss_terms.needs_reference(kl_coef, kl_reward_coef, kl_to_go)
  converse = functools.partial(
    conversation.converse,
    envs=envs,
    max_turns=max_turns,
    expected_turns=expected_turns,
  )
  generate = converse(policies, 'generate', group_size=group_size)
  measure = rollout_metrics.measure(group_size, num_minibatches * num_epochs)
  learn_role = functools.partial(
    _learn,
    group_size=group_size,
    staleness=staleness,
    objective=functools.partial(
      objectives.policy,
      clip=loss_terms.Clip(clip_low, clip_high, dual_clip),
      policy_loss=policy_loss,
      likelihood=likelihood,
      aggregate=aggregate,
      importance=loss_terms.Importance(
        importance_weight, importance_bound, importance_cap
      ),
      mask_truncated=mask_truncated,
    ),
    estimate=advantage_stages.estimator(
      advantage,
      group_size,
      kl_coef=kl_reward_coef,
      kl_to_go=kl_to_go,
      normalize=normalize_advantages,
      mask_truncated=mask_truncated,
      turn_advantage=turn_advantage,
    ),
    minibatch=minibatches.minibatches(
      minibatch_by, num_minibatches, num_epochs, group_size
    ),
    has_reference=has_kl,
    kl=loss_terms.KlPenalty(kl_coef, kl_estimator),
    entropy_coef=entropy_coef,
    balance_coef=balance_coef,
  )
  players = zip(envs.roles, policies, optimizers, strict=True)
  learn = [learn_role(*player) for player in players]
  step = _step(envs.roles, group_size, generate, verify, measure, learn)
  init = functools.partial(
    _init, policies, verify, optimizers, has_kl, staleness
  )
  evaluate = _evaluation(
    policies,
    verify,
    converse=converse,
    samples=eval_samples,
    greedy=eval_greedy,
  )
  params = functools.partial(_params, envs.roles)
  return base.Workflow(init, step, evaluate, params, staleness)


def _step(
  roles: Sequence[str],
  group_size: int,
  generate: Callable,
  verify: stages.Stage | verifiers.LearnedVerifier,
  measure: stages.Stage,
  learn: Sequence[Callable],
) -> Callable:
  """Returns `state, problem, key -> state, info`.

  Args:
    roles: their names.
    group_size: adjacent rows that share a prompt.
    generate: plays episodes, `Versions, problem, keys -> problem, experience`.
    verify: as in `role_grpo`.
    measure: metrics of all rows.
    learn: what each role learns, as `_learn` returns it.
  """
  repeat = policy_stages.repeat(group_size)
  by_role = roles_lib.split(roles_lib.cast(roles, group_size, None))
  merged = _merged(roles)

  def step(state: State, problem: base.Problem, key):
    behaviors, pasts = _delayed(state.learners)
    prompts = repeat(problem)
    finished, x = generate(behaviors, prompts, stages.keys(key, prompts.prompt))
    verdict = verifiers.judge(verify, state.verifier, finished.answer, x)
    info = measure(x, verdict, state.learners[0].actor.step)
    parts = state.learners, pasts, by_role(x, verdict)
    learners, infos = [], []
    for learn_one, *part in zip(learn, *parts, strict=True):
      learner, found = learn_one(key, *part)
      learners.append(learner)
      infos.append(found)
    state = state._replace(learners=tuple(learners))
    return state, info | merged(infos)

  return step


def _init(
  policies: Sequence[base.Policy],
  verify: stages.Stage | verifiers.LearnedVerifier,
  optimizers: Sequence[optax.GradientTransformation],
  has_reference: bool,
  staleness: int,
  key: base.Key,
) -> State:
  """The state before the first step."""
  settings = has_reference, staleness
  learners = tuple(
    policy_update.init(*parts, *settings, jax.random.fold_in(key, i))
    for i, parts in enumerate(zip(policies, optimizers, strict=True))
  )
  judge = verifiers.init(verify, jax.random.fold_in(key, len(learners)))
  return State(learners, judge)


def _evaluation(
  policies: Sequence[base.Policy], verify, **settings
) -> Callable:
  """Returns `state, problem, key -> info`; `settings` are of `evaluate`."""
  answer = evaluate_lib.evaluate(policies, verify, **settings)

  def evaluate(state: State, problem: base.Problem, key):
    versions = tuple(train_step.version(x.actor) for x in state.learners)
    return answer(versions, problem, key, state.verifier)

  return evaluate


def _params(roles: Sequence[str], state: State) -> dict[str, base.Params]:
  """The parameters of each role's policy, by its name."""
  pairs = zip(roles, state.learners, strict=True)
  return {name: learner.actor.params for name, learner in pairs}


def _delayed(learners: Sequence[policy_update.Learner]):
  """The versions that act, and the delay lines of the next step, by role."""
  pairs = [
    train_step.delayed(x.past, train_step.version(x.actor)) for x in learners
  ]
  return tuple(zip(*pairs, strict=True))


def _learn(
  name: str,
  policy: base.Policy,
  optimizer: optax.GradientTransformation,
  *,
  group_size: int,
  staleness: int,
  **settings,
) -> Callable:
  """Returns what one role learns in a step.

  Args:
    name: of the role.
    policy: its policy.
    optimizer: the optimizer of the policy.
    group_size: adjacent rows that share a prompt.
    staleness: as in `base.Workflow`.
    **settings: as in `policy_update.update`.

  Returns:
    `key, learner, past, (experience, verdict) -> learner, info`, for the delay
    line of the next step.
  """
  prefix = f'{name}_'
  measure_gap = stages.Stage(
    rollout_correction.logprob_gap,
    f'{prefix}logprob_gap',
    'sum',
    group_size=group_size,
  )
  rescore = policy_stages.proximal_logp(
    policy, group_size, staleness, prefix=prefix
  )
  update = policy_update.update(
    policy, optimizer, group_size=group_size, prefix=prefix, **settings
  )

  def learn(key, learner, past, given):
    x, verdict = given
    x = rescore(train_step.version(learner.actor), x)
    actor, info = update(learner, key, x.obs, x, verdict)
    if x.proximal is not None:
      info |= measure_gap(x)
    return learner._replace(actor=actor, past=past), info

  return learn


def _merged(roles: Sequence[str]) -> Callable:
  """Returns `infos -> info` with the metrics of each role and of all.

  Policies of several kinds have several metrics: one in bfloat16 alone has a
  gap between log-probabilities.
  """
  merge = stages.Stage(
    lambda *infos: functools.reduce(metrics.merge_named, infos),
    'merge_roles',
    'batch',
  )

  def run(infos: Sequence[base.Info]) -> base.Info:
    info = merge(*infos)
    named = {
      _named(metric, role): x
      for role, of_role in zip(roles, infos, strict=True)
      for metric, x in of_role.items()
    }
    return info | named

  return run


def _named(metric: str, role: str) -> str:
  """The name of a role's metric: `train/critic/entropy`."""
  split, _, rest = metric.partition('/')
  return f'{split}/{role}/{rest}'


def _check(policies, optimizers, envs: conversation.TextEnvs):
  counts = len(policies), len(optimizers), len(envs.roles)
  if len(set(counts)) > 1 or not envs.roles:
    raise ValueError(
      f'There are {counts[0]} policies, {counts[1]} optimizers and the roles '
      f'{[*envs.roles]} of the environments: give one of each for every role.'
    )
