"""Conversations that one step leaves unfinished and a later step continues."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import claims
from planner.ir import plan as plan_lib
from rlinf_jax.run_files import checkpoint
from rlinf_jax.runtime import flows
import saved
import stages
from stages import base, workflows
from stages.language import conversation, policy_stages
from tests.rlinf_jax.runtime.plans import invariance_test, random_plans_test
import tiny
import toy_conversation

LENGTH, TURNS, GROUP, GROUPS, STEPS = 16, 4, 2, 5, 6
CARRY, EXTRA = 2, 2
ROLES = ('one', 'other')
# Slots, a seed of the order of answers, and roles.
KINDS = {
  'together': (None, None, ()),
  'slots': (4, 0, ()),
  'roles': (None, None, ROLES),
}


@functools.cache
def policy():
  return tiny.policy(length=LENGTH)


@functools.cache
def params(i):
  """Parameters as they might be after update i."""
  first, other = (policy().init(jax.random.key(k)) for k in (1, 6))
  return jax.tree.map(lambda x, y: x + 0.1 * i * y, first, other)


def converse(slots, seed, roles, max_turns=TURNS):
  return toy_conversation.converse(
    max_turns, slots=slots, seed=seed, roles=roles
  )


def problem_of(i, roles=()):
  """The repeated problems of step i, numbered by their answers."""
  R = max(1, len(roles))
  problem = tiny.problem(rows=GROUPS * R, seed=i)
  number = 100 * i + jnp.arange(GROUPS * R) // R
  return policy_stages.repeat(GROUP)(problem._replace(answer=number))


def keys(i, roles=()):
  key = jax.random.fold_in(jax.random.key(0), i)
  return stages.keys(key, problem_of(i, roles).prompt)


@functools.cache
def play(kind, frozen):
  """Problems, experience, what is carried and metrics of each step."""
  slots, seed, roles = KINDS[kind]
  rollouts = conversation.partial_conversations(
    policy(),
    GROUP,
    converse=converse(slots, seed, roles),
    max_carry=CARRY,
    extra_groups=EXTRA,
  )
  first = tiny.problem(rows=GROUPS * max(1, len(roles)))
  carried, results = rollouts.allocate(first), []
  for i in range(STEPS):
    now = base.Version(params(0 if frozen else i), jnp.int32(i))
    problem, x, carried, info = rollouts.run(
      now, carried, problem_of(i, roles), keys(i, roles)
    )
    results.append(jax.device_get((problem, x, carried, info)))
  return results


def rows_of(steps):
  """Yields the number of its problem, the step, and each finished row."""
  for i, (problem, x, *_) in enumerate(steps):
    numbers = problem.answer.answer.tolist()
    empty = 0 if i else EXTRA * len(numbers) // GROUPS
    assert not x.mask[:empty].any()
    for b, number in enumerate(numbers):
      if b >= empty:
        row = jax.tree.map(lambda y, b=b: y[b], (x, problem.answer))
        yield number, i, *row


@pytest.mark.parametrize('kind', KINDS)
def test_carried_conversations_equal_those_that_one_step_finishes(kind):
  """With frozen parameters, no token, turn or reward is another."""
  *_, roles = KINDS[kind]
  whole = converse(None, None, roles)(policy(), 'generate', group_size=GROUP)
  now, want, counts, several = base.Version(params(0), 0), {}, {}, 0
  for i in range(STEPS):
    given = problem_of(i, roles), keys(i, roles)
    want[i] = jax.device_get(whole(now, *given))
  rows = GROUP * max(1, len(roles))
  for number, _, x, found in rows_of(play(kind, True)):
    start, n = divmod(number, 100)
    b = n * rows + counts.setdefault(number, 0)
    counts[number] += 1
    several += len({*x.version[x.mask > 0]}) > 1
    expected, other = want[start][1], want[start][0].answer
    for name in ('action', 'mask', 'truncated'):
      np.testing.assert_array_equal(
        getattr(x, name), getattr(expected, name)[b]
      )
    own = x.mask > 0
    np.testing.assert_allclose(x.logp[own], expected.logp[b][own], atol=1e-5)
    assert found.reward == other.reward[b]
    assert found.terms['turns'] == other.terms['turns'][b]
  assert several  # Of a conversation that two steps have played.


@pytest.mark.parametrize('kind', KINDS)
def test_no_group_is_lost_or_doubled_or_older_than_the_bound(kind):
  steps = play(kind, False)
  rows = GROUP * max(1, len(KINDS[kind][-1]))
  emitted, oldest = [], 0
  for number, i, x, _ in rows_of(steps):
    emitted.append(number)
    version = x.version[x.mask > 0]
    if version.size:
      assert i - CARRY <= number // 100 <= version.min() <= version.max() <= i
      assert (np.diff(version) >= 0).all()
      oldest = max(oldest, i - version.min())
  carried, last = steps[-1][2], steps[-1][3]
  waiting = carried.problem.answer.tolist()
  started = [100 * i + n for i in range(STEPS) for n in range(GROUPS)] * rows
  assert sorted(emitted + waiting) == sorted(started)
  assert 0 < oldest <= CARRY
  assert last['rollout/tokens_carried'] == carried.rows.own.sum()


def test_a_log_probability_is_of_the_version_that_drew_the_token():
  mixed = 0
  for _, x, *_ in play('slots', False):
    own = x.mask > 0
    mixed += (np.where(own, x.version, x.version.max()) < x.version.max()).sum()
    for i in {*x.version[own].tolist()}:
      logp = policy().evaluate(params(i), x.obs, x.action, group_size=1).logp
      here = own & (x.version == i)
      np.testing.assert_allclose(
        x.logp[here], np.asarray(logp)[here], rtol=0, atol=2e-5
      )
  assert mixed


PLANS = {
  'places': {
    'places': {p: {'devices': [i]} for i, p in enumerate('abc')},
    'stages': {'generate': 'a', 'environment': 'b', '*': 'c'},
  },
  'pieces and a mesh': {
    'places': {
      'a': {'devices': [0, 1], 'axes': [['data', 2]]},
      'b': {'devices': [2], 'axes': []},
    },
    'stages': {'gradient': 'b', 'apply': 'b', '*': 'a'},
    'pieces': 2,
  },
}


@functools.cache
def grpo(dtype='float64'):
  return workflows.grpo(
    tiny.policy(dtype, length=LENGTH),
    conversation.episode_return(),
    invariance_test.KEEP,
    group_size=GROUP,
    rollouts=functools.partial(
      conversation.partial_conversations,
      converse=converse(None, None, ()),
      max_carry=1,
      extra_groups=4,
    ),
  )


def batches():
  return [tiny.problem(rows=8, seed=i) for i in range(3)]


@functools.cache
def eager(dtype):
  """The first state, and state and metrics after each of three steps."""
  # This policy ends turns in either type; another fills most rows at once.
  first = state = flows.first_state(
    grpo(dtype), jax.random.key(3), batches()[0]
  )
  found = []
  for i, batch in enumerate(batches()):
    key = random_plans_test.key(i)
    state, info = grpo(dtype).step(state, batch, key)
    found.append((state, info))
  continued = [
    tiny.read(info)['rollout/continued_fraction'] for _, info in found
  ]
  assert max(continued) > 0
  return first, found


@pytest.mark.slow
@pytest.mark.usefixtures('in_float64')
@pytest.mark.parametrize('name', claims.some(PLANS, ['pieces and a mesh']))
def test_no_plan_changes_carried_conversations(name):
  first, found = eager('float64')
  flow = tiny.trace(grpo(), batches()[0])
  plan = plan_lib.parse(PLANS[name], flow.stages)
  got = random_plans_test.run(plan, grpo(), first, batches())
  want = [(tiny.arrays(state), tiny.arrays(info)) for state, info in found]
  random_plans_test.compare(plan, got, want)


@pytest.mark.slow
def test_a_checkpoint_holds_conversations_that_go_on(tmp_path):
  _, found = eager('float32')
  folder = checkpoint.Checkpoints(tmp_path, 1)
  folder.save(2, saved.Tree(found[1][0]), {'n': np.array(2)}, {})
  folder.close()
  other = flows.first_state(grpo('float32'), jax.random.key(7), batches()[0])
  folder = checkpoint.Checkpoints(tmp_path, 1)
  _, state = saved.load(folder, other, {'n': np.array(0)})
  folder.close()
  assert (np.asarray(state.carry.rows.own).sum(1) > 0).any()
  args = batches()[2], random_plans_test.key(2)
  tiny.assert_same_bits(grpo('float32').step(state, *args), found[2])


def test_as_many_extra_groups_as_a_batch_has_are_refused():
  rollouts = conversation.partial_conversations(
    policy(),
    GROUP,
    converse=converse(None, None, ROLES),
    max_carry=1,
    extra_groups=3,
  )
  with pytest.raises(ValueError, match='extra_groups=3 and 3 groups'):
    rollouts.allocate(tiny.problem(rows=6))
