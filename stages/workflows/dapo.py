"""Decoupled clip and dynamic sampling, DAPO, arXiv:2503.14476."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import stages
from stages import base, metrics, repeat
from stages.language import evaluate as evaluate_lib
from stages.language import policy_stages
from stages.learn import advantages, losses, minibatches, train_step
from stages.workflows.grpo import describe, objective


class State(NamedTuple):
  """What a step of DAPO reads and rewrites."""

  actor: base.TrainState


class Slots(NamedTuple):
  """The batch that is learned from, while it fills.

  Attributes:
    x: experience, in groups; with mask zero where nothing is yet.
    verdict: of it.
    filled: groups that are there.
    round: rounds of sampling so far.
    accuracy: of all that was drawn, accepted or not.
  """

  x: base.Experience
  verdict: base.Verdict
  filled: jax.Array
  round: jax.Array
  accuracy: metrics.Mean


def dapo(
  policy: base.Policy,
  verify: stages.Stage,
  optimizer: optax.GradientTransformation,
  *,
  group_size: int,
  max_rounds: int,
  clip_low: float = 0.2,
  clip_high: float = 0.28,
  overlong_buffer: int | None = None,
  num_minibatches: int = 1,
  num_epochs: int = 1,
  expected_rounds: int | None = None,
  importance_cap: float = 2.0,
) -> base.Workflow:
  """Learns from groups that are neither all right nor all wrong.

  A batch is prompts for `max_rounds` rounds of sampling. Each round takes its
  share of them and keeps the groups of mixed accuracy, until as many as it asks
  for are there or no prompts are left. What is then missing is padding: it
  has no tokens, and the loss is a mean over tokens. (The paper samples without
  a bound.)

  Args:
    policy: the model to train.
    verify: `answer, action, mask -> base.Verdict`.
    optimizer: how gradients become updates.
    group_size: completions a prompt.
    max_rounds: of sampling, at most.
    clip_low: how far the probability ratio may fall.
    clip_high: how far it may rise (clip-higher).
    overlong_buffer: the last tokens before the length limit, over which the
      reward falls linearly by 1 (soft overlong punishment, eq. 13); None for no
      punishment.
    num_minibatches: minibatches of one batch, each an optimiser step.
    num_epochs: how often the batch is learned from, in another order each time.
    expected_rounds: rounds that planners shall count on; all if None.
    importance_cap: as in `grpo`.
  """
  together = functools.partial(stages.stage, group_size=group_size)
  loss = objective(
    functools.partial(policy.evaluate, group_size=group_size),
    (clip_low, clip_high, None),
    (0.0, losses.kl_k3),
    0.0,
    losses.token_mean,
    importance_cap,
  )
  ask = stages.Stage(
    functools.partial(_ask, max_rounds, group_size), 'ask', 'batch'
  )
  accept = stages.Stage(
    functools.partial(_accept, group_size), 'accept', 'batch'
  )
  deal = minibatches.shuffle(num_minibatches, num_epochs, group_size)
  shuffled = minibatches.gather(group_size)
  gradient = stages.Stage(
    train_step.gradient(loss),
    'gradient',
    'sum',
    unbatched=(0,),
    group_size=group_size,
  )
  apply = stages.Stage(train_step.apply(optimizer), 'apply', 'batch')
  fold = stages.Stage(
    lambda *infos: functools.reduce(metrics.merge, infos), 'merge_info', 'batch'
  )
  measure = stages.Stage(
    functools.partial(
      _describe, group_size=group_size, updates=num_minibatches * num_epochs
    ),
    'measure',
    'batch',
  )
  examine = evaluate_lib.evaluate(policy, verify)

  generate = policy_stages.act(policy, 'generate', group_size=group_size)
  recall = policy_stages.proximal_logp(policy, group_size)

  @stages.stage('empty_slots', 'batch')
  def begin(actor: base.Version, problem: base.Problem, key):
    problem, key_B = _ask(max_rounds, group_size, problem, key, jnp.int32(0))
    like = generate.shapes(actor, problem.prompt, key_B)
    x = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    like = verify.shapes(problem.answer, x.action, x.mask)
    verdict = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    zero, none = jnp.zeros(()), jnp.int32(0)
    # A prompt all of padding is none: a policy may make NaN of it.
    x = x._replace(obs=problem.prompt)
    return Slots(x, verdict, none, none, metrics.Mean(zero, zero))

  @together('group_advantage')
  def compare(reward_B, mask_BT):
    """Of shaped rewards; A is zero on padding."""
    if overlong_buffer is not None:
      reward_B += overlong(mask_BT.sum(1), mask_BT.shape[1], overlong_buffer)
    reward_NG = reward_B.reshape(-1, group_size)
    advantage_NG = jax.vmap(advantages.group_relative)(reward_NG)
    return advantage_NG.reshape(-1, 1) * mask_BT

  def sample(slots: Slots, actor: base.Version, problem, key):
    """One round: to be repeated."""
    asked, key_B = ask(problem, key, slots.round)
    x = generate(actor, asked.prompt, key_B)
    return accept(slots, x, verify(asked.answer, x.action, x.mask))

  fill = repeat.Repeat(sample, 'fill', max_rounds, expected_rounds)

  def init(key):
    return State(train_step.init(policy.init(key), optimizer))

  def step(state: State, problem: base.Problem, key):
    actor = state.actor
    now = base.Version(actor.params, actor.step)
    empty = begin(now, problem, key)
    dealt = deal(key, empty.x.mask)  # Whatever will be there.
    slots = fill(empty, now, problem, key)
    x = recall(now, slots.x)
    measured = measure(slots._replace(x=x), actor.step)
    x = x._replace(advantage=compare(slots.verdict.reward, x.mask))
    infos = []
    for (batch,) in shuffled(dealt, (x,)):
      actor, info = apply(actor, gradient(actor.params, batch, ()))
      infos.append(info)
    info = infos[0] if len(infos) == 1 else fold(*infos)
    return State(actor), measured | info

  def evaluate(state: State, problem: base.Problem, key):
    now = base.Version(state.actor.params, state.actor.step)
    return examine(now, problem, key)

  return base.Workflow(init, step, evaluate, lambda state: state.actor.params)


def overlong(length_B, limit: int, cache: int):
  """Soft overlong punishment, arXiv:2503.14476 eq. 13.

    0                          where |y| ≤ L − C
    ((L − C) − |y|) / C        where L − C < |y| ≤ L

  Args:
    length_B: |y|.
    limit: L, beyond which no completion goes.
    cache: C.
  """
  return jnp.clip((limit - cache - length_B) / cache, -1.0, 0.0)


def _ask(rounds: int, group_size: int, problem: base.Problem, key, round_):
  """The prompts of a round, each for a group, and a key for every row.

  A row's key is that of its place among the rows of all rounds, so that it
  depends neither on how many rounds there are nor on what they accept.
  """
  N = jax.tree.leaves(problem)[0].shape[0]
  if N % rounds:
    raise ValueError(
      f'{N} prompts cannot be asked in {rounds} rounds: the batch must be a '
      f'multiple of {rounds} prompts, and is for all rounds together.'
    )
  n = N // rounds

  def take(x):
    x = jax.lax.dynamic_slice_in_dim(jnp.asarray(x), round_ * n, n)
    return jnp.repeat(x, group_size, axis=0)

  id_B = round_ * n * group_size + jnp.arange(n * group_size)
  key_B = jax.vmap(jax.random.fold_in, (None, 0))(key, id_B)
  return jax.tree.map(take, problem), key_B


def _accept(group_size: int, slots: Slots, x: base.Experience, verdict):
  """Puts groups of mixed accuracy into the slots that are free, in order.

  Returns:
    `slots, done`: the slots, and whether all of them are filled.
  """
  correct_NG = verdict.correct.reshape(-1, group_size)
  N = correct_NG.shape[0]
  mixed_N = correct_NG.max(1) != correct_NG.min(1)
  slot_N = slots.filled + jnp.cumsum(mixed_N) - 1
  slot_N = jnp.where(mixed_N, jnp.minimum(slot_N, N), N)  # N is nowhere.

  def put(old, new):
    groups = old.reshape(N, group_size, *old.shape[1:])
    new = new.reshape(groups.shape)
    return groups.at[slot_N].set(new, mode='drop').reshape(old.shape)

  kept, judged = jax.tree.map(put, (slots.x, slots.verdict), (x, verdict))
  filled = jnp.minimum(N, slots.filled + mixed_N.sum(dtype=jnp.int32))
  drawn = metrics.mean(verdict.correct.astype(slots.accuracy.sum.dtype))
  slots = Slots(
    kept, judged, filled, slots.round + 1, slots.accuracy.merge(drawn)
  )
  return slots, filled >= N


def _describe(
  slots: Slots, now, group_size: int, updates: int
) -> dict[str, Any]:
  """What is worth knowing of what was drawn, and of what is learned from."""
  N, one = slots.x.mask.shape[0] // group_size, jnp.ones(())
  told = describe(slots.x, slots.verdict, now, group_size, updates)
  del told['rollout/groups_degenerate']  # There are none.
  return told | {
    'rollout/accuracy': slots.accuracy,
    'rollout/rounds': metrics.Mean(slots.round * one, one),
    'rollout/groups_filled': metrics.Mean(slots.filled * one, N * one),
  }
