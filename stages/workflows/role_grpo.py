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
  rollout_metrics,
)
from stages.language import evaluate as evaluate_lib
from stages.language.conversation import roles as roles_lib
from stages.learn import (
  advantages,
  loss_terms,
  losses,
  minibatches,
  objectives,
  signatures,
  train_step,
)


class State(NamedTuple):
  """State carried from step to step.

  Attributes:
    actors: the policy of each role, with its own optimizer.
  """

  actors: tuple[base.TrainState, ...]


def role_grpo(
  policies: Sequence[base.Policy],
  verify: stages.Stage,
  optimizers: Sequence[optax.GradientTransformation],
  *,
  envs: conversation.TextEnvs,
  max_turns: ranges.PositiveInt,
  group_size: ranges.PositiveInt,
  expected_turns: ranges.PositiveInt | None = None,
  clip_low: ranges.NonNegativeFloat = 0.2,
  clip_high: ranges.NonNegativeFloat = 0.2,
  entropy_coef: float = 0.0,
  num_minibatches: ranges.PositiveInt = 1,
  num_epochs: ranges.PositiveInt = 1,
  advantage: signatures.GroupAdvantage = advantages.group_relative,
  turn_advantage: signatures.TurnAdvantage | None = None,
  aggregate: signatures.Aggregate = losses.sequence_mean_token_mean,
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
    verify: stage `answer, action, mask -> base.Verdict`, such as
      `conversation.episode_return()`.
    optimizers: the optimizer of each policy.
    envs: environments with roles.
    max_turns: turns of each role, as in `conversation.converse`.
    group_size: episodes of each problem.
    expected_turns: turns that planners count on; `max_turns` if None.
    clip_low: as in `grpo`.
    clip_high: likewise.
    entropy_coef: likewise.
    num_minibatches: minibatches of the rows of a role, one update each.
    num_epochs: passes over them.
    advantage: as in `grpo`.
    turn_advantage: likewise.
    aggregate: likewise.
    eval_samples: as `samples` in `evaluate`.
    eval_greedy: as `greedy` in `evaluate`.

  Raises:
    ValueError: if there is not one policy and one optimizer for each role.
  """
  _check(policies, optimizers, envs)
  converse = functools.partial(
    conversation.converse,
    envs=envs,
    max_turns=max_turns,
    expected_turns=expected_turns,
  )
  generate = converse(policies, 'generate', group_size=group_size)
  cast = roles_lib.cast(envs.roles, group_size, None)
  repeat = policy_stages.repeat(group_size)
  measure = rollout_metrics.measure(group_size, num_minibatches * num_epochs)
  by_role = stages.Stage(
    lambda *rows: [
      jax.tree.map(functools.partial(roles_lib.rows_of, cast, i), rows)
      for i in range(len(cast.names))
    ],
    'by_role',
    'batch',
  )
  estimate = advantage_stages.estimator(
    advantage, group_size, turn_advantage=turn_advantage
  )
  minibatch = minibatches.minibatches(
    'row', num_minibatches, num_epochs, group_size
  )
  merge_info = stages.Stage(
    lambda *infos: functools.reduce(metrics.merge, infos),
    'merge_roles',
    'batch',
  )
  updates = [
    _update(
      *parts,
      group_size=group_size,
      clip=loss_terms.Clip(clip_low, clip_high, None),
      entropy_coef=entropy_coef,
      aggregate=aggregate,
    )
    for parts in zip(envs.roles, policies, optimizers, strict=True)
  ]
  evaluate_actors = evaluate_lib.evaluate(
    policies,
    verify,
    samples=eval_samples,
    greedy=eval_greedy,
    converse=converse,
  )

  def init(key) -> State:
    pairs = zip(policies, optimizers, strict=True)
    return State(
      tuple(
        train_step.init(policy.init(jax.random.fold_in(key, i)), optimizer)
        for i, (policy, optimizer) in enumerate(pairs)
      )
    )

  def versions(state: State) -> tuple[base.Version, ...]:
    return tuple(train_step.version(actor) for actor in state.actors)

  def step(state: State, problem: base.Problem, key):
    prompts = repeat(problem)
    finished, x = generate(
      versions(state), prompts, stages.keys(key, prompts.prompt)
    )
    verdict = verify(finished.answer, x.action, x.mask)
    info = measure(x, verdict, state.actors[0].step)
    parts = by_role(x, verdict.reward, verdict.turns)
    actors, infos = [], []
    for actor, update, (x, reward_B, turns) in zip(
      state.actors, updates, parts, strict=True
    ):
      x = x._replace(advantage=estimate(x, reward_B, (), turns))
      actor, found = update(actor, x, lambda x: minibatch(key, x.obs, x, ()))
      actors.append(actor)
      infos.append(found)
    for name, found in zip(envs.roles, infos, strict=True):
      info |= {_named(metric, name): x for metric, x in found.items()}
    return State(tuple(actors)), info | merge_info(*infos)

  def evaluate(state: State, problem: base.Problem, key):
    return evaluate_actors(versions(state), problem, key)

  def params(state: State) -> dict[str, base.Params]:
    pairs = zip(envs.roles, state.actors, strict=True)
    return {name: actor.params for name, actor in pairs}

  return base.Workflow(init, step, evaluate, params)


def _update(
  name: str,
  policy: base.Policy,
  optimizer: optax.GradientTransformation,
  *,
  group_size: int,
  clip: loss_terms.Clip,
  entropy_coef: float,
  aggregate: signatures.Aggregate,
) -> Callable:
  """Returns `actor, experience, cut -> actor, info` of one role.

  `cut` makes minibatches of the experience.
  """
  with_proximal = policy_stages.proximal_logp(
    policy, group_size, prefix=f'{name}_'
  )
  informative_only = not entropy_coef
  loss = objectives.policy(
    policy_stages.scorer(policy, group_size, informative_only),
    clip=clip,
    entropy_coef=entropy_coef,
    aggregate=aggregate,
  )
  learn = train_step.learner(
    loss, optimizer, group_size=group_size, prefix=f'{name}_'
  )

  def update(actor: base.TrainState, x: base.Experience, cut):
    x = with_proximal(train_step.version(actor), x)
    return learn(actor, cut(x))

  return update


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
