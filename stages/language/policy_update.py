"""A policy's state and its part of a step: advantages, minibatches and updates.

It is what `workflows.grpo` and `workflows.dapo` do with the rewards of a batch,
and what `workflows.role_grpo` does with those of each role.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

import stages
from stages import base
from stages.language import policy_stages, rollout_metrics, verifiers
from stages.language.scoring import balance
from stages.learn import loss_terms, train_step


class Learner(NamedTuple):
  """State of a policy that learns, carried from step to step.

  Attributes:
    actor: the policy being trained.
    reference: its initial parameters, without frozen ones; `()` where nothing
      reads them.
    past: versions of the actor before each of the last `staleness` steps, the
      oldest first, without frozen parameters.
  """

  actor: base.TrainState
  reference: base.Params
  past: tuple[base.Version, ...]


def init(
  policy: base.Policy,
  optimizer: optax.GradientTransformation,
  has_reference: bool,
  staleness: int,
  key: base.Key,
) -> Learner:
  """The learner before the first step."""
  actor = train_step.init(policy.init(key), optimizer)
  now = train_step.snapshot(train_step.version(actor))
  reference = ()
  if has_reference:
    reference = policy_stages.reference(policy, actor.params)
  return Learner(actor, reference, (now,) * staleness)


class State(NamedTuple):
  """State of a workflow of one policy, carried from step to step.

  Attributes:
    actor: as in `Learner`.
    reference: likewise.
    past: likewise.
    carry: what `rollouts` carries from step to step, or from round to round;
      `()` by default.
    verifier: parameters of a learned verifier; `()` for others.
  """

  actor: base.TrainState
  reference: base.Params
  past: tuple[base.Version, ...]
  carry: Any = ()
  verifier: base.Params = ()


def init_state(
  policy: base.Policy,
  verify: stages.Stage | verifiers.LearnedVerifier,
  optimizer: optax.GradientTransformation,
  has_reference: bool,
  staleness: int,
  key: base.Key,
) -> State:
  """The state of a workflow before the first step."""
  learner = init(policy, optimizer, has_reference, staleness, key)
  judge = verifiers.init(verify, jax.random.fold_in(key, 1))
  return State(*learner, verifier=judge)


def update(
  policy: base.Policy,
  optimizer: optax.GradientTransformation,
  objective: Callable,
  estimate: Callable,
  minibatch: Callable,
  *,
  group_size: int,
  has_reference: bool,
  kl: loss_terms.KlPenalty,
  entropy_coef: float = 0.0,
  balance_coef: float = 0.0,
  prefix: str = '',
) -> Callable:
  """Returns the updates of a policy in a step, one for each minibatch.

  Args:
    policy: the policy.
    optimizer: its optimizer.
    objective: `objectives.policy` with its other terms.
    estimate: advantages, as `advantage_stages.estimator` returns it.
    minibatch: as `minibatches.minibatches` returns it.
    group_size: adjacent rows that share a prompt.
    has_reference: whether the loss or the advantages read a reference.
    kl: as in `objectives.policy`.
    entropy_coef: likewise.
    balance_coef: likewise.
    prefix: of the names of its stages, where a workflow has several policies.

  Returns:
    `learner, key, obs, experience, verdict -> actor, info`, where the learner
    has the `actor` and `reference` of a `Learner`. `key` and `obs` are for
    `minibatch`.

  Raises:
    ValueError: for a `balance_coef` of a policy without experts.
  """
  balance.check(policy, balance_coef)
  # Completions without an advantage have no other gradients.
  informative_only = not (kl.coef or entropy_coef or balance_coef)
  score_ref = policy_stages.ref_logp(policy, group_size, has_reference, prefix)
  padding = rollout_metrics.packed_padding(policy, group_size, informative_only)
  loss = objective(
    policy_stages.scorer(
      policy, group_size, informative_only, balance=balance_coef > 0
    ),
    kl=kl,
    entropy_coef=entropy_coef,
    balance_coef=balance_coef,
  )
  learn = train_step.learner(
    loss,
    optimizer,
    group_size=group_size,
    divisible_groups=True,
    prefix=prefix,
  )

  def run(learner, key, obs, x: base.Experience, verdict: base.Verdict):
    actor = learner.actor
    ref_logp = score_ref(learner.reference, train_step.version(actor), x)
    advantage = estimate(x, verdict.reward, ref_logp, verdict.turns)
    batches = minibatch(key, obs, x._replace(advantage=advantage), ref_logp)
    info = padding(batches)
    actor, learned = learn(actor, batches)
    return actor, info | learned

  return run
