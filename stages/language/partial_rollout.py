"""Partial rollouts: groups that a step leaves unfinished, and a later goes on.

The long tail of a batch is short of rows. Where a few more groups are under way
than a step learns from, it need not wait for the last: those that have not
ended are carried, and go on by newer parameters (arXiv:2501.12599 §2.6,
arXiv:2505.24298 §4). None may become older than a bound of steps.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

import stages
from stages import base, metrics
from stages.language import policy_stages


class Rollout(NamedTuple):
  """Groups on their way, the oldest first.

  Attributes:
    problem: what they answer.
    key: of each row, as its bits, which a checkpoint can hold.
    draft: completions so far; without a token where nobody is yet.
    version: updates that the parameters had seen which drew each token.
    age: steps since the row was begun.
  """

  problem: base.Problem
  key: Array
  draft: base.Draft
  version: Int[Array, 'B T']
  age: Int[Array, ' B']


def check(policy: base.Policy, partial: int, spare: int):
  """Refuses what cannot be carried."""
  if (partial > 0) != (spare > 0) or min(partial, spare) < 0:
    raise ValueError(
      f'A step of partial={partial} and spare={spare} is not one: give both to '
      'carry `spare` groups for up to `partial` steps, or neither.'
    )
  if partial and policy.resume is None:
    raise ValueError(
      'Partial rollouts were asked of a policy that cannot go on with what it '
      'has begun: leave out partial and spare, or let another act.'
    )


def acts(
  policy: base.Policy, group_size: int, partial: int, spare: int = 0
) -> Callable:
  """Returns `Version, rollout, problem, keys -> problem, x, rollout, told`.

  Args:
    policy: who acts.
    group_size: adjacent rows that share a prompt.
    partial: steps for which a group may be carried. If 0, every group is
      handed on by the step that begins it, and nothing is carried.
    spare: groups that are carried.
  """
  if not partial:
    generate = policy_stages.act(policy, 'generate', group_size=group_size)
    return lambda actor, rollout, problem, keys: (
      *(problem, generate(actor, problem.prompt, keys), rollout, {}),
    )
  if policy.out_shapes is None:
    generate = stages.Stage(
      functools.partial(go_on, policy, group_size, partial), 'generate', 'batch'
    )
  else:
    generate = _outside(policy, group_size, partial, spare)
  carried = stages.Stage(describe, 'carry_metrics', 'batch')

  def act(actor, rollout, problem, keys):
    problem, x, rollout = generate(actor, rollout, problem, keys)
    return problem, x, rollout, carried(x.version, x.mask, rollout.draft.mask)

  return act


def begin(
  policy: base.Policy, problem: base.Problem, group_size: int, spare: int
) -> Rollout:
  """Room for `spare` groups, where nobody is yet.

  What then goes on first is nobody, so that a run's first step learns from so
  many groups less. Every later one learns from as many as it is given.
  """
  groups = jax.tree.leaves(problem)[0].shape[0]
  if spare >= groups:
    raise ValueError(
      f'{spare} spare groups beside {groups} of a step would leave its first '
      'with nobody to learn from: give fewer, or larger batches.'
    )
  key_N = jax.random.split(jax.random.key(0), groups)
  params = jax.eval_shape(policy.init, key_N[0])
  given = params, problem.prompt, key_N
  x = (
    policy.out_shapes(*given)
    if policy.out_shapes
    else jax.eval_shape(policy.act, *given)
  )
  B = spare * group_size

  def zeros(like):
    return jax.tree.map(lambda x: jnp.zeros((B, *x.shape[1:]), x.dtype), like)

  return Rollout(
    problem=zeros(problem),
    key=zeros(jax.random.key_data(key_N)),
    draft=base.Draft(*zeros((x.action, x.logp, x.mask)), jnp.zeros(B, bool)),
    version=jnp.zeros((B, x.mask.shape[1]), jnp.int32),
    age=jnp.zeros(B, jnp.int32),
  )


def join(rollout: Rollout, problem: base.Problem, key_B) -> Rollout:
  """Carried groups, then new ones, of which there is no token yet."""
  B = key_B.shape[0]
  none = jax.tree.map(lambda x: jnp.zeros((B, *x.shape[1:]), x.dtype), rollout)
  new = none._replace(
    problem=problem,
    key=jax.random.key_data(key_B),
    draft=none.draft._replace(alive=jnp.ones(B, bool)),
  )
  # A prompt all of padding is none: a policy may make NaN of it.
  # Whom an engine has not come to yet is somebody, and alive.
  nobody = ~rollout.draft.alive & (rollout.draft.mask.max(1) == 0)
  asked = jax.tree.map(
    lambda old, new: jnp.where(
      nobody.reshape(-1, *(1,) * (old.ndim - 1)), new[:1], old
    ),
    *(rollout.problem, problem),
  )
  rollout = rollout._replace(problem=asked)
  return jax.tree.map(lambda *x: jnp.concatenate(x), rollout, new)


def go_on(
  policy: base.Policy,
  group_size: int,
  partial: int,
  actor: base.Version,
  rollout: Rollout,
  problem: base.Problem,
  key_B: base.Key,
) -> tuple[base.Problem, base.Experience, Rollout]:
  """Decodes until as many groups have ended as were begun.

  And until none that is left would become older than `partial` steps.

  Returns:
    As many groups as `problem` has, those that were begun first before others,
    and what is left for the next step.
  """
  carried = rollout.age.shape[0]
  slots = join(rollout, problem, key_B)
  made = policy.resume(
    actor.params,
    slots.problem.prompt,
    jax.random.wrap_key_data(slots.key, impl=jax.random.key_impl(key_B)),
    slots.draft,
    group_size=group_size,
    begun=carried,
    go_on=_wanted(slots.age, group_size, partial, carried // group_size),
  )
  return hand_on(group_size, carried // group_size, actor, slots, made)


def _wanted(age_B, group_size: int, partial: int, spare: int) -> Callable:
  """Returns `open_B -> bool`: whether groups must go on, given open rows."""
  due = age_B[::group_size] >= partial

  def wanted(open_):
    open_ = open_.reshape(-1, group_size).any(1)
    return (open_.sum() > spare) | (open_ & due).any()

  return wanted


def _outside(policy, group_size: int, partial: int, spare: int) -> Callable:
  """As `go_on`, where an engine outside JAX draws the tokens."""

  def run(actor: base.Version, slots: Rollout):
    return policy.resume(
      actor.params,
      slots.problem.prompt,
      slots.key,
      slots.draft,
      group_size=group_size,
      begun=spare * group_size,
      go_on=_wanted(slots.age, group_size, partial, spare),
    )

  gather = stages.Stage(join, 'join', 'batch')
  generate = stages.Stage(
    run,
    'generate',
    'batch',
    unbatched=(0,),
    host=True,
    out_shapes=lambda actor, slots: slots.draft,
    asynchronous=True,
  )
  deal = stages.Stage(
    functools.partial(hand_on, group_size, spare), 'emit', 'batch'
  )

  def act(actor, rollout, problem, key_B):
    slots = gather(rollout, problem, key_B)
    return deal(actor, slots, generate(actor, slots))

  return act


def hand_on(
  group_size: int,
  spare: int,
  actor: base.Version,
  slots: Rollout,
  made: base.Draft,
) -> tuple[base.Problem, base.Experience, Rollout]:
  """Parts what has ended from `spare` groups that go on; as `go_on`."""
  n = slots.age.shape[0] // group_size - spare
  old = slots.draft.mask
  slots = slots._replace(
    draft=made,
    version=jnp.where(old > 0, slots.version, actor.step),
    age=slots.age + 1,
  )
  # What had ended has drawn nothing since, and arrives first.
  drawn = (made.mask - old).sum(1, dtype=jnp.int32)
  ended, left = share(made, group_size, n)
  out, rest = (
    jax.tree.map(lambda x, rows=rows: x[rows], slots) for rows in (ended, left)
  )
  x = base.Experience(
    obs=out.problem.prompt,
    action=out.draft.action,
    logp=out.draft.logp,
    mask=out.draft.mask,
    truncated=out.draft.alive.astype(jnp.float32),
    version=out.version,
    arrival=drawn[ended],
  )
  return out.problem, x, rest


def share(draft: base.Draft, group_size: int, n: int) -> tuple[Array, Array]:
  """Rows of the first `n` groups that have ended, and the others, in order."""
  B, T = draft.mask.shape
  open_B = draft.alive & (draft.mask.sum(1) < T)
  ended_N = ~open_B.reshape(-1, group_size).any(1)
  out_N = ended_N & (jnp.cumsum(ended_N) <= n)
  order_N = jnp.argsort(~out_N, stable=True)
  id_NG = jnp.arange(B).reshape(-1, group_size)[order_N]
  return id_NG[:n].ravel(), id_NG[n:].ravel()


def describe(version_BT, mask_BT, left) -> dict[str, Any]:
  """What is worth knowing of rows that several steps drew.

  Args:
    version_BT: of tokens handed on.
    mask_BT: one on them.
    left: one on tokens that go on to the next step.
  """
  most = jnp.iinfo(version_BT.dtype).max
  first_B = jnp.where(mask_BT > 0, version_BT, most).min(1)
  last_B = jnp.where(mask_BT > 0, version_BT, 0).max(1)
  several_B = (first_B < last_B).astype(mask_BT.dtype)
  return {
    'rollout/continued_fraction': metrics.mean(several_B, mask_BT.max(1)),
    'rollout/tokens_carried': left.sum(),
  }
