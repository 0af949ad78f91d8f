"""Groups of rows that are carried from step to step until they are finished.

What a row is, the caller says: a completion, or a conversation. A step learns
from the groups that have finished, and the next step continues the others.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from stages import base, metrics


class Carried(NamedTuple):
  """Unfinished groups, a fixed number of them, the oldest first.

  A group is empty before the first step: its `age` is 0.

  Attributes:
    problem: the problems of the rows.
    key: key data of each row, which a checkpoint can store.
    rows: what was generated so far.
    version: optimizer steps that the parameters had seen which drew each token.
    age: steps since the row was started.
    kept: keys and values of rows, for calls with the same parameters: a
      `language.decoding.slots.kept_rows.KeptRows`; `()` where none are kept, as
      from step to step.
  """

  problem: base.Problem
  key: Array
  rows: Any
  version: Int[Array, 'B T']
  age: Int[Array, ' B']
  kept: Any = ()


def check(policy: base.Policy, max_carry: int, extra_groups: int):
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
      'use another policy. One that reads pictures or replays routing has '
      'none: set replay_routing to False.'
    )


def allocate(
  problem: base.Problem,
  rows: Any,
  T: int,
  *,
  groups: int,
  group_size: int,
  extra_groups: int,
) -> Carried:
  """Empty groups.

  They count as finished, so the first step of a run learns from `extra_groups`
  fewer groups. Every later step learns from as many groups as its batch has.

  Args:
    problem: a batch of problems.
    rows: shapes of what is generated for any number of rows.
    T: tokens of a row.
    groups: groups of a batch.
    group_size: rows of a group.
    extra_groups: groups to carry, fewer than those of a batch.
  """
  if extra_groups >= groups:
    raise ValueError(
      f'With extra_groups={extra_groups} and {groups} groups a batch, the '
      'first step would have no group to learn from: lower extra_groups, or '
      'raise the batch size.'
    )
  B = extra_groups * group_size

  def zeros(tree):
    return jax.tree.map(lambda x: jnp.zeros((B, *x.shape[1:]), x.dtype), tree)

  return Carried(
    problem=zeros(problem),
    key=zeros(jax.random.key_data(jax.random.split(jax.random.key(0), 1))),
    rows=zeros(rows),
    version=jnp.zeros((B, T), jnp.int32),
    age=jnp.zeros(B, jnp.int32),
  )


def append(
  carried: Carried, problem: base.Problem, key_B: base.Key, rows: Any
) -> Carried:
  """Carried groups, followed by new groups, whose `rows` have no tokens."""
  B = key_B.shape[0]
  new = Carried(
    problem=problem,
    key=jax.random.key_data(key_B),
    rows=rows,
    version=jnp.zeros((B, carried.version.shape[1]), jnp.int32),
    age=jnp.zeros(B, jnp.int32),
  )

  def fill(old, new):
    """A real prompt for empty groups: a policy may return NaN without."""
    empty = (carried.age == 0).reshape(-1, *(1,) * (old.ndim - 1))
    return jnp.where(empty, new[:1], old)

  filled = jax.tree.map(fill, carried.problem, problem)
  carried = carried._replace(problem=filled)
  return jax.tree.map(lambda *x: jnp.concatenate(x), carried, new)


def should_continue(
  age_B, group_size: int, max_carry: int, extra_groups: int
) -> Callable:
  """Returns `open_B -> bool`: whether to go on, given the unfinished rows."""
  due_N = age_B[::group_size] >= max_carry

  def goes_on(open_B):
    open_N = open_B.reshape(-1, group_size).any(1)
    return (open_N.sum() > extra_groups) | (open_N & due_N).any()

  return goes_on


def emit(
  groups: Carried,
  rows: Any,
  step,
  *,
  drawn_before_BT,
  open_B,
  group_size: int,
  extra_groups: int,
) -> tuple[Carried, Carried, Array, Array]:
  """Separates finished groups from the `extra_groups` that are carried.

  Args:
    groups: all groups, as they were before this step.
    rows: their rows, as they are now.
    step: version of the parameters that drew the new tokens.
    drawn_before_BT: more than 0 on tokens of earlier steps.
    open_B: rows that are not finished.
    group_size: adjacent rows of a group.
    extra_groups: number of groups to carry.

  Returns:
    The finished groups, as many as a batch has; the others; and the row ids of
    both.
  """
  groups = groups._replace(
    rows=rows,
    version=jnp.where(drawn_before_BT > 0, groups.version, step),
    age=groups.age + 1,
  )
  n = groups.age.shape[0] // group_size - extra_groups
  ended, left = split_finished(open_B, group_size, n)
  done = jax.tree.map(lambda x: x[ended], groups)
  rest = jax.tree.map(lambda x: x[left], groups)
  return done, rest, ended, left


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
