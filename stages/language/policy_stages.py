"""Stages of a language policy: acting and scoring its actions."""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sharding import rules
import stages
from stages import base
from stages.language import sample
from stages.learn import rollout_correction, train_step


def act(
  policy: base.Policy, name: str, *, group_size: int = 1, greedy: bool = False
) -> stages.Stage:
  """Returns `Version, obs, keys -> Experience`, whose tokens name the version.

  Args:
    policy: the policy. The stage is a host stage if an engine outside JAX acts.
    name: name of the stage.
    group_size: adjacent rows that share their observation.
    greedy: take the most likely action instead of a sample.
  """
  host = policy.out_shapes is not None

  def run_by(act, is_deferred, actor: base.Version, obs, key_B):
    def versioned(x: base.Experience):
      return x._replace(version=jnp.broadcast_to(actor.step, x.mask.shape))

    settings = {'record': True} if policy.replays_routing else {}
    group = rules.local_group(group_size, key_B.shape[0])
    settings |= {'group_size': group, 'greedy': greedy}
    x = act(actor.params, obs, key_B, **settings)
    return stages.Deferred(x, versioned) if is_deferred else versioned(x)

  run = functools.partial(run_by, policy.act, host)

  def out_shapes(actor: base.Version, obs, key_B):
    x = policy.out_shapes(actor.params, obs, key_B)
    version = jax.ShapeDtypeStruct(x.mask.shape, actor.step.dtype)
    return x._replace(version=version)

  engine = policy.engine
  if engine:
    equivalent = functools.partial(run_by, engine.equivalent, False)
    engine = engine._replace(equivalent=equivalent)
  settings = {'group_size': group_size, 'engine': engine}
  settings |= {'unbatched': (0,), 'rounds': rounds(policy)}
  if not host:
    return stages.Stage(run, name, divisible_groups=True, **settings)
  return stages.Stage(
    run, name, host=True, out_shapes=out_shapes, asynchronous=True, **settings
  )


def rounds(policy: base.Policy) -> dict[int, Callable]:
  """`Stage.rounds` of a stage that acts by the `Version` that it takes.

  The version is its first argument.
  """
  is_engine = policy.out_shapes is not None
  round_ = policy.round_for_engine if is_engine else policy.round_params
  if round_ is None:
    return {}

  def rounded_version(actor: base.Version):
    return actor._replace(params=round_(actor.params))

  return {0: rounded_version}


def score(
  policy: base.Policy,
  params,
  prompt: base.Prompt,
  action_BT,
  mask_BT,
  group_size: int = 1,
  balance: bool = False,
  routing=None,
) -> base.Evaluation:
  """Scores completions by `policy.evaluate`; arbitrary where `mask_BT` is 0.

  With `balance`, also the balance of experts. With `routing`, tokens use the
  experts that were recorded.
  """
  group = rules.local_group(group_size, action_BT.shape[0])
  settings = {'group_size': group}
  if routing is not None:
    settings['routing'] = routing
  if balance:
    settings['balance'] = True
  if balance or policy.packed_tokens is not None:
    settings['mask'] = mask_BT
  return policy.evaluate(params, prompt, action_BT, **settings)


def scorer(
  policy: base.Policy,
  group_size: int,
  informative_only: bool = False,
  balance: bool = False,
) -> Callable:
  """Returns `params, experience -> base.Evaluation`, for a loss.

  Args:
    policy: the policy.
    group_size: adjacent rows that share their observation.
    informative_only: whether a policy that packs leaves out completions whose
      advantages are all 0, which have no policy gradient. They keep the
      log-probabilities around which ratios are clipped, so that theirs are 1.
    balance: whether to measure the balance of experts, too.
  """

  def run(params, x: base.Experience):
    settings = group_size, balance, x.routing
    return score(policy, params, x.obs, x.action, x.mask, *settings)

  def run_informative(params, x: base.Experience):
    settings = group_size, balance, x.routing
    mask_BT = informative_mask(x.mask, x.advantage)
    now = score(policy, params, x.obs, x.action, mask_BT, *settings)
    old_BT = rollout_correction.old_logp(x)
    return now._replace(logp=jnp.where(mask_BT > 0, now.logp, old_BT))

  return run_informative if informative_only and policy.packed_tokens else run


def informative_mask(mask_BT, advantage_BT):
  """`mask_BT`, 0 also on completions whose advantages are all 0.

  They have no policy gradient: those of a group whose rewards are all equal.
  """
  return mask_BT * (advantage_BT != 0).any(1, keepdims=True)


def logp(
  policy: base.Policy, name: str, group_size: int, replays: bool = False
) -> Callable:
  """Returns `params, experience -> logp_BT`, from a forward pass.

  With `replays`, tokens use the experts that were recorded, if any were.
  """
  is_packed = policy.packed_tokens is not None

  def run(params, obs, action_BT, routing=None, mask_BT=None):
    return score(
      policy, params, obs, action_BT, mask_BT, group_size, routing=routing
    ).logp

  stage = stages.Stage(
    run,
    name,
    unbatched=(0,),
    group_size=group_size,
    divisible_groups=True,
    rounds=policy.rounds,
  )

  def call(params, x: base.Experience):
    routing = x.routing if replays else None
    masks = (x.mask,) if is_packed else ()  # Others do not read it.
    return stage(params, x.obs, x.action, routing, *masks)

  return call


def reference(policy: base.Policy, params) -> base.Params:
  """The parameters of a reference: a copy of those trained, as they are now."""
  return rounded(policy, train_step.trainable(params))


def rounded(policy: base.Policy, params) -> base.Params:
  """Parameters for a policy that is evaluated and not trained.

  In bfloat16 arithmetic, they take half of the memory of float32, and
  log-probabilities are the same.
  """
  return policy.round_params(params) if policy.round_params else params


def ref_logp(
  policy: base.Policy, group_size: int, is_read: bool, prefix: str = ''
) -> Callable:
  """Returns `reference, Version, experience -> logp_BT` of a reference policy.

  The version has the frozen parameters, which the reference shares. Where
  nothing reads the log-probabilities, the result is `()`.
  """
  if not is_read:
    return lambda reference, now, x: ()
  stage = logp(policy, f'{prefix}ref_logp', group_size)

  def score(reference, now: base.Version, x: base.Experience):
    return stage(train_step.with_frozen(reference, now.params), x)

  return score


def proximal_logp(
  policy: base.Policy,
  group_size: int,
  staleness: int = 0,
  rollouts: 'Rollouts | None' = None,
  prefix: str = '',
) -> Callable:
  """Returns `Version, experience -> experience` with proximal log-probs.

  These are the trainer's own log-probabilities under the parameters before the
  update, which the version has; see `learn.rollout_correction`. They are
  computed where older parameters acted, and where the recorded ones are rounded
  in another way: an engine outside JAX acted, or decoding in bfloat16 did.
  Otherwise they equal the recorded ones to float32's rounding, and the
  experience is returned unchanged.

  Args:
    policy: the policy.
    group_size: adjacent rows that share their observation.
    staleness: as in `base.Workflow`.
    rollouts: how completions are generated; None where a step finishes all.
    prefix: of the name of the stage, where a workflow has several policies.
  """
  is_stale = staleness > 0 or bool(rollouts and rollouts.allocate)
  if not rollout_correction.is_needed(policy, is_stale):
    return lambda now, x: x
  stage = logp(policy, f'{prefix}proximal_logp', group_size, replays=True)

  def with_proximal(now: base.Version, x: base.Experience):
    return x._replace(proximal=stage(now.params, x))

  return with_proximal


def check_sampling(policy: base.Policy):
  """Refuses a policy that scores under another distribution than its own.

  Raises:
    ValueError: if it samples at another temperature than 1, or from a part of
      the vocabulary.
  """
  if policy.sampling not in (None, sample.Sampling()):
    raise ValueError(
      'Examples are learned by their likelihood under the whole distribution, '
      f'and the policy scores them under {policy.sampling}: leave its '
      '`sampling` out.'
    )


def repeat(group_size: int) -> stages.Stage:
  """Returns a stage that repeats each problem for the rows of its group."""

  def run(problem: base.Problem):
    return jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), problem)

  return stages.Stage(run, 'repeat', 'batch')


class Rollouts(NamedTuple):
  """A method of generating completions for a training step.

  Attributes:
    run: `Version, carry, problem, keys -> problem, experience, carry, info`.
      Returns the problems and the experience of finished rows, the state that
      is carried to the next step, and metrics.
    allocate: `problem -> carry` of the first step; None if nothing is carried,
      so that the version that a step is given draws all of its tokens.
    keep: `carry -> carry`, in which calls of `run` with the same parameters
      also keep keys and values; None if they cannot.
    drop: `carry -> carry` without these.
  """

  run: Callable
  allocate: Callable | None = None
  keep: Callable | None = None
  drop: Callable | None = None


RolloutMethod = Callable[[base.Policy, int], Rollouts]
"""`policy, group_size -> Rollouts`: how a workflow generates completions."""


def one_turn(
  policy: base.Policy, name: str, *, group_size: int = 1, greedy: bool = False
) -> Callable:
  """Returns `Version, problem, keys -> problem, Experience`: one completion.

  `stages.language.conversation.converse` returns the same for many turns.

  Args:
    policy: as in `act`.
    name: likewise.
    group_size: likewise.
    greedy: likewise.
  """
  generate = act(policy, name, group_size=group_size, greedy=greedy)

  def run(actor: base.Version, problem: base.Problem, keys):
    return problem, generate(actor, problem.prompt, keys)

  return run


def complete(
  policy: base.Policy, group_size: int, *, converse: Callable = one_turn
) -> Rollouts:
  """Returns rollouts in which every step finishes all of its prompts.

  Args:
    policy: the policy that generates.
    group_size: adjacent rows that share a prompt.
    converse: generates the rows: `one_turn`, a completion each, or
      `conversation.converse`, a conversation each.
  """
  generate = converse(policy, 'generate', group_size=group_size)

  def run(actor: base.Version, carry, problem: base.Problem, keys):
    problem, x = generate(actor, problem, keys)
    return problem, x, carry, {}

  return Rollouts(run)


def workflow(
  init: Callable,
  step: Callable,
  version: Callable[..., base.Version],
  evaluate_actor: Callable,
  rollouts: Rollouts | None = None,
  staleness: int = 0,
) -> base.Workflow:
  """A workflow of a language model, with its evaluation.

  The field `verifier` of its state, if it has one, has the parameters of a
  learned verifier, and the field `carry` what rollouts carry, if they do.

  Args:
    init: as in `base.Workflow`.
    step: likewise.
    version: `state -> Version` of the policy.
    evaluate_actor: `Version, problem, key, verifier_params -> info`.
    rollouts: how completions are generated; None where a step finishes all.
    staleness: as in `base.Workflow`.
  """

  def evaluate(state, problem: base.Problem, key):
    verifier = getattr(state, 'verifier', ())
    return evaluate_actor(version(state), problem, key, verifier)

  def allocate(state, problem: base.Problem):
    return state._replace(carry=rollouts.allocate(problem))

  return base.Workflow(
    init,
    step,
    evaluate,
    lambda state: version(state).params,
    staleness,
    allocate=allocate if rollouts and rollouts.allocate else None,
  )
