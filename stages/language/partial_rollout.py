"""Partial rollouts: completions that continue over several training steps.

The last few rows of a batch take much longer than the rest. With more groups in
flight than a step learns from, a step need not wait for the slowest: unfinished
groups are carried to the next step and continue with newer parameters
(arXiv:2501.12599 §2.6, arXiv:2505.24298 §4). A bound on their age in steps
limits how stale their first tokens become.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from sharding import rules
import stages
from stages import base, metrics
from stages.language import policy_stages


class Rollout(NamedTuple):
  """Unfinished groups, a fixed number of them, the oldest first.

  A group is empty before the first step: `alive` is 0 and no token is drawn.

  Attributes:
    problem: the problems that the rows answer.
    key: key data of each row, which a checkpoint can store.
    completions: tokens drawn so far.
    version: optimizer steps that the parameters had seen which drew each token.
    age: steps since the row was started.
  """

  problem: base.Problem
  key: Array
  completions: base.Completions
  version: Int[Array, 'B T']
  age: Int[Array, ' B']


def partial_rollouts(
  policy: base.Policy, group_size: int, *, max_carry: int, extra_groups: int
) -> policy_stages.Rollouts:
  """Generates completions that may take several steps, for `grpo(rollouts=…)`.

  The importance weights of the loss then correct for tokens that older
  parameters sampled.

  Args:
    policy: the policy that generates.
    group_size: adjacent rows that share a prompt.
    max_carry: steps for which an unfinished group may be carried.
    extra_groups: groups in flight beside those that a step learns from.
  """
  check(policy, max_carry, extra_groups)
  generate = act(policy, group_size, max_carry, extra_groups)
  with_proximal = policy_stages.proximal_logp(
    policy, group_size, several=max_carry > 0
  )

  def run(actor: base.Version, rollout: Rollout, problem: base.Problem, keys):
    problem, x, rollout, info = generate(actor, rollout, problem, keys)
    return problem, with_proximal(actor, x), rollout, info

  def first_carry(problem: base.Problem) -> Rollout:
    return allocate(policy, problem, group_size, extra_groups)

  return policy_stages.Rollouts(run, first_carry if max_carry else None)


def check(
  policy: base.Policy,
  max_carry: int,
  extra_groups: int,
):
  """Refuses settings and policies that cannot carry groups."""
  if (max_carry > 0) != (extra_groups > 0) or min(max_carry, extra_groups) < 0:
    raise ValueError(
      f'Partial rollouts got max_carry={max_carry} and '
      f'extra_groups={extra_groups}: set both above 0 to carry unfinished '
      'groups from step to step, or both to 0 to finish every group.'
    )
  if max_carry and policy.resume is None:
    raise ValueError(
      'Partial rollouts need a policy that can resume unfinished completions, '
      'and this one has no `resume`: leave out max_carry and extra_groups, or '
      'use another policy. One that decodes in `slots` has none, nor has one '
      'that reads pictures or replays routing: set slots to None, or '
      'replay_routing to False.'
    )


def act(
  policy: base.Policy, group_size: int, max_carry: int, extra_groups: int = 0
) -> Callable:
  """Returns `Version, rollout, problem, keys -> problem, x, rollout, info`.

  Args:
    policy: the policy that generates.
    group_size: adjacent rows that share a prompt.
    max_carry: steps for which a group may be carried. If 0, a step finishes
      every group that it starts, and the rollout passes through unchanged.
    extra_groups: groups that are carried.
  """
  if not max_carry:
    generate = policy_stages.act(policy, 'generate', group_size=group_size)

    def finish_all(actor, rollout, problem, keys):
      return problem, generate(actor, problem.prompt, keys), rollout, {}

    return finish_all
  if policy.out_shapes is None:
    generate = stages.Stage(
      functools.partial(continue_, policy, group_size, max_carry),
      'generate',
      'batch',
    )
  else:
    generate = _host_generate(policy, group_size, max_carry, extra_groups)
  info = stages.Stage(carry_metrics, 'carry_metrics', 'batch')

  def carry(actor, rollout, problem, keys):
    problem, x, rollout = generate(actor, rollout, problem, keys)
    carried = info(x.version, x.mask, rollout.completions.mask)
    return problem, x, rollout, carried

  return carry


def allocate(
  policy: base.Policy, problem: base.Problem, group_size: int, extra_groups: int
) -> Rollout:
  """`extra_groups` empty groups.

  Empty groups count as finished, so the first step of a run learns from
  `extra_groups` fewer groups. Every later step learns from as many groups as
  its batch has.
  """
  groups = jax.tree.leaves(problem)[0].shape[0]
  check_extra(extra_groups, groups)
  key_N = jax.random.split(jax.random.key(0), groups)
  params = jax.eval_shape(policy.init, key_N[0])
  args = params, problem.prompt, key_N
  x = (
    policy.out_shapes(*args)
    if policy.out_shapes
    else jax.eval_shape(policy.act, *args)
  )
  B = extra_groups * group_size

  def zeros(tree):
    return jax.tree.map(lambda x: jnp.zeros((B, *x.shape[1:]), x.dtype), tree)

  return Rollout(
    problem=zeros(problem),
    key=zeros(jax.random.key_data(key_N)),
    completions=base.Completions(
      *zeros((x.action, x.logp, x.mask)), alive=jnp.zeros(B, bool)
    ),
    version=jnp.zeros((B, x.mask.shape[1]), jnp.int32),
    age=jnp.zeros(B, jnp.int32),
  )


def check_extra(extra_groups: int, groups: int):
  """Refuses as many groups in flight as a batch has, or more."""
  if extra_groups >= groups:
    raise ValueError(
      f'With extra_groups={extra_groups} and {groups} groups a batch, the '
      'first step would have no group to learn from: lower extra_groups, or '
      'raise the batch size.'
    )


def append(rollout: Rollout, problem: base.Problem, key_B) -> Rollout:
  """Carried groups, followed by new groups without tokens."""
  B = key_B.shape[0]
  zeros = jax.tree.map(lambda x: jnp.zeros((B, *x.shape[1:]), x.dtype), rollout)
  new = zeros._replace(
    problem=problem,
    key=jax.random.key_data(key_B),
    completions=zeros.completions._replace(alive=jnp.ones(B, bool)),
  )
  # Empty groups get a real prompt: a policy may return NaN for one that is all
  # padding. Rows that an engine has queued but not started are alive, not
  # empty.
  old = rollout.completions
  empty = ~old.alive & (old.mask.max(1) == 0)

  def fill(old, new):
    here = empty.reshape(-1, *(1,) * (old.ndim - 1))
    return jnp.where(here, new[:1], old)

  filled = jax.tree.map(fill, rollout.problem, problem)
  rollout = rollout._replace(problem=filled)
  return jax.tree.map(lambda *x: jnp.concatenate(x), rollout, new)


def continue_(
  policy: base.Policy,
  group_size: int,
  max_carry: int,
  actor: base.Version,
  rollout: Rollout,
  problem: base.Problem,
  key_B: base.Key,
) -> tuple[base.Problem, base.Experience, Rollout]:
  """Generates until as many groups have finished as were started.

  It also finishes every group that would otherwise be carried for more than
  `max_carry` steps.

  Returns:
    As many finished groups as `problem` has, the oldest first, and the
    unfinished groups for the next step.
  """
  carried = rollout.age.shape[0]
  groups = append(rollout, problem, key_B)
  completions = policy.resume(
    actor.params,
    groups.problem.prompt,
    jax.random.wrap_key_data(groups.key, impl=jax.random.key_impl(key_B)),
    groups.completions,
    # Rows that share a prompt on a device; groups still end as a whole.
    group_size=rules.local_group(group_size, groups.age.shape[0]),
    num_started=carried,
    should_continue=should_continue(
      groups.age, group_size, max_carry, carried // group_size
    ),
  )
  return emit(group_size, carried // group_size, actor, groups, completions)


def should_continue(
  age_B, group_size: int, max_carry: int, extra_groups: int
) -> Callable:
  """Returns `open_B -> bool`: whether to go on, given the unfinished rows."""
  due_N = age_B[::group_size] >= max_carry

  def goes_on(open_B):
    open_N = open_B.reshape(-1, group_size).any(1)
    return (open_N.sum() > extra_groups) | (open_N & due_N).any()

  return goes_on


def _host_generate(
  policy, group_size: int, max_carry: int, extra_groups: int
) -> Callable:
  """Does what `continue_` does, with an engine outside JAX."""

  def run(actor: base.Version, groups: Rollout):
    return policy.resume(
      actor.params,
      groups.problem.prompt,
      groups.key,
      groups.completions,
      group_size=group_size,
      num_started=extra_groups * group_size,
      should_continue=should_continue(
        groups.age, group_size, max_carry, extra_groups
      ),
    )

  append_stage = stages.Stage(append, 'append', 'batch')
  generate = stages.Stage(
    run,
    'generate',
    'batch',
    unbatched=(0,),
    host=True,
    out_shapes=lambda actor, groups: groups.completions,
    asynchronous=True,
  )
  emit_stage = stages.Stage(
    functools.partial(emit, group_size, extra_groups), 'emit', 'batch'
  )

  def run_stages(actor, rollout, problem, key_B):
    groups = append_stage(rollout, problem, key_B)
    return emit_stage(actor, groups, generate(actor, groups))

  return run_stages


def emit(
  group_size: int,
  extra_groups: int,
  actor: base.Version,
  groups: Rollout,
  completions: base.Completions,
) -> tuple[base.Problem, base.Experience, Rollout]:
  """Separates finished groups from the `extra_groups` that are carried.

  Args:
    group_size: adjacent rows that share a prompt.
    extra_groups: number of groups to carry.
    actor: the parameters that drew the new tokens.
    groups: all groups, as they were before.
    completions: the completions of `groups`, as they are now.

  Returns:
    As `continue_`.
  """
  n = groups.age.shape[0] // group_size - extra_groups
  old_mask_BT = groups.completions.mask
  groups = groups._replace(
    completions=completions,
    version=jnp.where(old_mask_BT > 0, groups.version, actor.step),
    age=groups.age + 1,
  )
  # Rows that had finished before have drawn nothing since, so they rank first.
  drawn_B = (completions.mask - old_mask_BT).sum(1, dtype=jnp.int32)
  open_B = completions.alive & (completions.mask.min(1) == 0)
  ended, left = split_finished(open_B, group_size, n)
  done = jax.tree.map(lambda x: x[ended], groups)
  rest = jax.tree.map(lambda x: x[left], groups)
  x = base.Experience(
    obs=done.problem.prompt,
    action=done.completions.action,
    logp=done.completions.logp,
    mask=done.completions.mask,
    truncated=done.completions.alive.astype(jnp.float32),
    version=done.version,
    arrival=drawn_B[ended],
  )
  return done.problem, x, rest


def split_finished(
  open_B: Bool[Array, ' B'], group_size: int, n: int
) -> tuple[Array, Array]:
  """Row ids of the first `n` finished groups and of the others, in order.

  Args:
    open_B: rows that are not finished.
    group_size: adjacent rows of a group.
    n: groups to split off; at least as many must be finished.
  """
  ended_N = ~open_B.reshape(-1, group_size).any(1)
  out_N = ended_N & (jnp.cumsum(ended_N) <= n)
  order_N = jnp.argsort(~out_N, stable=True)
  id_NG = jnp.arange(open_B.shape[0]).reshape(-1, group_size)[order_N]
  return id_NG[:n].ravel(), id_NG[n:].ravel()


def carry_metrics(version_BT, mask_BT, carried_mask) -> dict[str, Any]:
  """Metrics of rows that several steps generated.

  Args:
    version_BT: version of the tokens of finished rows.
    mask_BT: 1 on those tokens.
    carried_mask: 1 on tokens that are carried to the next step.
  """
  largest = jnp.iinfo(version_BT.dtype).max
  first_B = jnp.where(mask_BT > 0, version_BT, largest).min(1)
  last_B = jnp.where(mask_BT > 0, version_BT, 0).max(1)
  several_B = (first_B < last_B).astype(mask_BT.dtype)
  return {
    'rollout/continued_fraction': metrics.mean(several_B, mask_BT.max(1)),
    'rollout/tokens_carried': carried_mask.sum(),
  }
