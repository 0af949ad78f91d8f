"""Partial rollouts: completions that continue over several training steps.

The last few rows of a batch take much longer than the rest. With more groups in
flight than a step learns from, a step need not wait for the slowest: unfinished
groups are carried to the next step and continue with newer parameters
(arXiv:2501.12599 §2.6, arXiv:2505.24298 §4). A bound on their age in steps
limits how stale their first tokens become.
"""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp

from sharding import rules
import stages
from stages import base
from stages.language import policy_stages
from stages.language.partial_rollout import carried as carried_lib


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
  carried_lib.check(policy, max_carry, extra_groups)
  generate = act(policy, group_size, max_carry, extra_groups)

  def first_carry(problem: base.Problem) -> carried_lib.Carried:
    return allocate(policy, problem, group_size, extra_groups)

  if not max_carry:
    return policy_stages.Rollouts(generate)
  if policy.empty_kept is None:
    return policy_stages.Rollouts(generate, first_carry)
  empty_kept = stages.Stage(
    functools.partial(_empty_kept, policy), 'empty_kept', 'batch'
  )

  def keep(carried: carried_lib.Carried) -> carried_lib.Carried:
    return carried._replace(kept=empty_kept(carried.age))

  def drop(carried: carried_lib.Carried) -> carried_lib.Carried:
    return carried._replace(kept=())

  return policy_stages.Rollouts(generate, first_carry, keep, drop)


def _empty_kept(policy: base.Policy, age_B):
  """Keys and values of none of the carried rows."""
  return policy.empty_kept(age_B.shape[0])


def act(
  policy: base.Policy, group_size: int, max_carry: int, extra_groups: int = 0
) -> Callable:
  """Returns `Version, carried, problem, keys -> problem, x, carried, info`.

  Args:
    policy: the policy that generates.
    group_size: adjacent rows that share a prompt.
    max_carry: steps for which a group may be carried. If 0, a step finishes
      every group that it starts, and `carried` passes through unchanged.
    extra_groups: groups that are carried.
  """
  if not max_carry:
    generate = policy_stages.act(policy, 'generate', group_size=group_size)

    def finish_all(actor, carried, problem, keys):
      return problem, generate(actor, problem.prompt, keys), carried, {}

    return finish_all
  if policy.out_shapes is None:
    generate = stages.Stage(
      functools.partial(continue_, policy, group_size, max_carry),
      'generate',
      'batch',
      engine=_engine(policy, group_size, max_carry, extra_groups),
      rounds=policy_stages.rounds(policy),
    )
  else:
    generate = _host_generate(policy, group_size, max_carry, extra_groups)
  measure = stages.Stage(carried_lib.carry_metrics, 'carry_metrics', 'batch')

  def carry(actor, carried, problem, keys):
    problem, x, carried = generate(actor, carried, problem, keys)
    info = measure(x.version, x.mask, carried.rows.mask)
    return problem, x, carried, info

  return carry


def _engine(
  policy: base.Policy, group_size: int, max_carry: int, extra_groups: int
) -> stages.EngineCost | None:
  """Continuous batching of `continue_`, for the cost model; None without it."""
  engine = policy.engine
  if engine is None:
    return None

  def attention(actor: base.Version, carried, problem: base.Problem, key_B):
    return engine.attention(actor.params, problem.prompt, key_B)

  def rows(actor: base.Version, carried, problem: base.Problem, key_B):
    return carried.age.shape[0] + key_B.shape[0]

  def resized(rows: int, actor: base.Version, carried, problem, key_B):
    """As many groups as the rows have, with the same share of carried ones."""
    now = carried.age.shape[0] + key_B.shape[0]
    groups = max(2, rows // group_size)
    old = round(groups * carried.age.shape[0] / now)
    old = min(max(1, old), groups - 1)

    def some(tree, groups):
      return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
          (groups * group_size, *x.shape[1:]), x.dtype
        ),
        tree,
      )

    new = some((problem, key_B), groups - old)
    return actor, some(carried, old), *new

  static = policy._replace(resume=engine.resume)

  def equivalent(actor: base.Version, carried, problem: base.Problem, key_B):
    """Reads all rows again, and returns as much as is kept."""
    problem, x, rest = continue_(
      static,
      group_size,
      max_carry,
      actor,
      carried._replace(kept=()),
      problem,
      key_B,
    )
    return problem, x, rest._replace(kept=carried.kept)

  return engine._replace(
    equivalent=equivalent,
    attention=attention,
    continued=extra_groups * group_size,
    rows=rows,
    resized=resized,
  )


def allocate(
  policy: base.Policy, problem: base.Problem, group_size: int, extra_groups: int
) -> carried_lib.Carried:
  """`extra_groups` empty groups of completions."""
  groups = jax.tree.leaves(problem)[0].shape[0]
  key_N = jax.random.split(jax.random.key(0), groups)
  params = jax.eval_shape(policy.init, key_N[0])
  args = params, problem.prompt, key_N
  x = (
    policy.out_shapes(*args)
    if policy.out_shapes
    else jax.eval_shape(policy.act, *args)
  )
  alive_N = jax.ShapeDtypeStruct((groups,), bool)
  return carried_lib.allocate(
    problem,
    base.Completions(x.action, x.logp, x.mask, alive=alive_N),
    x.mask.shape[1],
    groups=groups,
    group_size=group_size,
    extra_groups=extra_groups,
  )


def append(
  carried: carried_lib.Carried, problem: base.Problem, key_B: base.Key
) -> carried_lib.Carried:
  """Carried groups, followed by new groups without tokens."""
  B = key_B.shape[0]
  new = jax.tree.map(
    lambda x: jnp.zeros((B, *x.shape[1:]), x.dtype), carried.rows
  )
  new = new._replace(alive=jnp.ones(B, bool))
  return carried_lib.append(carried, problem, key_B, new)


def continue_(
  policy: base.Policy,
  group_size: int,
  max_carry: int,
  actor: base.Version,
  carried: carried_lib.Carried,
  problem: base.Problem,
  key_B: base.Key,
) -> tuple[base.Problem, base.Experience, carried_lib.Carried]:
  """Generates until as many groups have finished as were started.

  It also finishes every group that would otherwise be carried for more than
  `max_carry` steps.

  Returns:
    As many finished groups as `problem` has, the oldest first, and the
    unfinished groups for the next step. If `carried` has a part `kept`, those
    have one, too.
  """
  rows = carried.age.shape[0]
  groups = append(carried._replace(kept=()), problem, key_B)
  kept = {'kept': carried.kept} if carried.kept else {}
  found = policy.resume(
    actor.params,
    groups.problem.prompt,
    jax.random.wrap_key_data(groups.key, impl=jax.random.key_impl(key_B)),
    groups.rows,
    # Rows that share a prompt on a device; groups still end as a whole.
    group_size=rules.local_group(group_size, groups.age.shape[0]),
    num_started=rows,
    should_continue=carried_lib.should_continue(
      groups.age, group_size, max_carry, rows // group_size
    ),
    **kept,
  )
  found = found if kept else (found,)
  return emit(group_size, rows // group_size, actor, groups, *found)


def _host_generate(
  policy, group_size: int, max_carry: int, extra_groups: int
) -> Callable:
  """Does what `continue_` does, with an engine outside JAX."""

  def run(actor: base.Version, groups: carried_lib.Carried):
    return policy.resume(
      actor.params,
      groups.problem.prompt,
      groups.key,
      groups.rows,
      group_size=group_size,
      num_started=extra_groups * group_size,
      should_continue=carried_lib.should_continue(
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
    out_shapes=lambda actor, groups: groups.rows,
    asynchronous=True,
    rounds=policy_stages.rounds(policy),
  )
  emit_stage = stages.Stage(
    functools.partial(emit, group_size, extra_groups), 'emit', 'batch'
  )

  def run_stages(actor, carried, problem, key_B):
    groups = append_stage(carried, problem, key_B)
    return emit_stage(actor, groups, generate(actor, groups))

  return run_stages


def emit(
  group_size: int,
  extra_groups: int,
  actor: base.Version,
  groups: carried_lib.Carried,
  completions: base.Completions,
  kept: Callable | None = None,
) -> tuple[base.Problem, base.Experience, carried_lib.Carried]:
  """Separates finished groups from the `extra_groups` that are carried.

  Args:
    group_size: adjacent rows that share a prompt.
    extra_groups: number of groups to carry.
    actor: the parameters that drew the new tokens.
    groups: all groups, as they were before.
    completions: the completions of `groups`, as they are now.
    kept: `row_N -> kept`, keys and values of rows; None if none are kept.

  Returns:
    As `continue_`.
  """
  before_BT = groups.rows.mask
  done, rest, ended, left = carried_lib.emit(
    groups,
    completions,
    actor.step,
    drawn_before_BT=before_BT,
    open_B=completions.alive & (completions.mask.min(1) == 0),
    group_size=group_size,
    extra_groups=extra_groups,
  )
  # Rows that had finished before have drawn nothing since, so they rank first.
  drawn_B = (completions.mask - before_BT).sum(1, dtype=jnp.int32)
  x = base.Experience(
    obs=done.problem.prompt,
    action=done.rows.action,
    logp=done.rows.logp,
    mask=done.rows.mask,
    truncated=done.rows.alive.astype(jnp.float32),
    version=done.version,
    arrival=drawn_B[ended],
  )
  if kept is not None:
    rest = rest._replace(kept=kept(left))
  return done.problem, x, rest
