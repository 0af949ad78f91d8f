"""Groups that one step leaves unfinished and a later step continues."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import claims
from sharding import mesh as mesh_lib
import stages
from stages import base
from stages.language import language_model, partial_rollout
from stages.language.partial_rollout import carried as carried_lib
from stages.language.partial_rollout import completions as partial_completions
import tiny

KEY = jax.random.key(0)
GROUP, GROUPS, LENGTH = 2, 6, 24
STOP = (0, 1, 2)


@functools.cache
def policy(dtype='float32', length=LENGTH, slots=None):
  """A policy whose rows mostly have a few tokens, and sometimes many."""
  config = dataclasses.replace(tiny.CONFIG, dtype=dtype)
  return language_model.policy(
    config, response_length=length, stop=STOP, slots=slots
  )


def completions_of(lengths, ended, T=4) -> base.Completions:
  """Completions with these lengths."""
  length_B = jnp.array(lengths)
  mask_BT = (jnp.arange(T)[None] < length_B[:, None]).astype(jnp.float32)
  return base.Completions(
    mask_BT.astype(jnp.int32), -mask_BT, mask_BT, ~jnp.array(ended, bool)
  )


def test_the_first_finished_groups_are_split_off_in_order():
  # Groups of two, of which the first and the fourth are unfinished.
  open_B = jnp.array([0, 1, 0, 0, 0, 0, 1, 0, 0, 0], bool)
  out, rest = carried_lib.split_finished(open_B, 2, 2)
  assert out.tolist() == [2, 3, 4, 5]
  assert rest.tolist() == [0, 1, 6, 7, 8, 9]
  out, rest = carried_lib.split_finished(open_B, 2, 3)
  assert out.tolist() == [2, 3, 4, 5, 8, 9]


def rollout_of(lengths, ended) -> carried_lib.Carried:
  """Rows with these lengths, numbered by their answers.

  Rows that have ended without a token are those of empty groups.
  """
  completions = completions_of(lengths, ended)
  B, T = completions.mask.shape
  prompt = base.Prompt(jnp.ones((B, 1), jnp.int32), jnp.ones((B, 1), jnp.int32))
  return carried_lib.Carried(
    base.Problem(prompt, jnp.arange(B)),
    jnp.zeros((B, 2), jnp.uint32),
    completions,
    jnp.zeros((B, T), jnp.int32),
    (completions.alive | (completions.mask.max(1) > 0)).astype(jnp.int32),
  )


def test_new_groups_follow_carried_ones_and_empty_groups_get_a_real_problem():
  # The last carried group is not empty: it waits, alive, without a token.
  old = rollout_of([3, 0, 0, 2, 0, 0], [0, 1, 1, 0, 0, 0])
  new = rollout_of([0, 0], [0, 0]).problem
  new = new._replace(answer=jnp.array([70, 71]))
  groups = partial_completions.append(old, new, jax.random.split(KEY, 2))
  assert groups.problem.answer.tolist() == [0, 70, 70, 3, 4, 5, 70, 71]
  assert groups.rows.mask.sum(1).tolist() == [3, 0, 0, 2, 0, 0, 0, 0]
  assert groups.rows.alive.tolist() == [True, False, False] + [True] * 5


def test_metrics_of_rows_that_several_steps_generated():
  version = np.array([[2, 2, 3], [3, 3, 0], [1, 2, 2], [0, 0, 0]])
  mask = np.float32([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
  info = carried_lib.carry_metrics(
    jnp.array(version), jnp.array(mask), jnp.ones((2, 3))
  )
  assert info['rollout/continued_fraction'].value()[''] == pytest.approx(1 / 3)
  assert info['rollout/tokens_carried'] == 6


@pytest.mark.parametrize(
  'max_carry, extra_groups, words',
  [
    (1, 0, 'max_carry=1 and extra_groups=0'),
    (0, 2, 'extra_groups=2'),
    (-1, -1, '-1'),
  ],
)
def test_only_one_of_the_two_settings_is_refused(
  max_carry, extra_groups, words
):
  with pytest.raises(ValueError, match=words):
    carried_lib.check(policy(), max_carry, extra_groups)


def test_a_policy_that_cannot_resume_is_refused():
  engine = policy()._replace(resume=None)
  with pytest.raises(ValueError, match='this one has no `resume`'):
    partial_rollout.partial_rollouts(engine, 2, max_carry=1, extra_groups=1)


def test_as_many_extra_groups_as_a_batch_has_are_refused():
  with pytest.raises(ValueError, match='extra_groups=6 and 6 groups'):
    partial_completions.allocate(policy(), tiny.problem(rows=6), GROUP, 6)


def problem_of(i) -> base.Problem:
  """The problems of step i, numbered by their answers."""
  problem = tiny.problem(rows=GROUPS, seed=i)
  problem = problem._replace(answer=problem.answer + 100 * i)
  return jax.tree.map(lambda x: jnp.repeat(x, GROUP, axis=0), problem)


def keys(i):
  return stages.keys(jax.random.fold_in(KEY, i), problem_of(i).prompt)


@functools.cache
def params(i):
  """Parameters as they might be after update i."""
  first, other = (policy().init(jax.random.key(k)) for k in (5, 6))
  return jax.tree.map(lambda x, y: x + 0.1 * i * y, first, other)


@functools.cache
def act(max_carry, slots=None):
  return partial_completions.act(policy(slots=slots), GROUP, max_carry)


@functools.cache
def run(max_carry, extra_groups, steps, frozen=True, slots=None):
  """Problems, experience, carried rollout and metrics of each step."""
  rollout = partial_completions.allocate(
    policy(), tiny.problem(GROUPS), GROUP, extra_groups
  )
  results = []
  for i in range(steps):
    actor = base.Version(params(0 if frozen else i), jnp.int32(i))
    problem, x, rollout, info = act(max_carry, slots)(
      actor, rollout, problem_of(i), keys(i)
    )
    results.append((problem, x, rollout, info))
  return results


def rows_of(steps):
  """Yields the answer, step and experience of every finished row."""
  for i, (problem, x, *_) in enumerate(steps):
    for b, answer in enumerate(np.asarray(problem.answer)):
      if x.mask[b].any():
        yield int(answer), i, jax.tree.map(lambda x, b=b: x[b], x)


def tokens_of(problem, x):
  """The tokens of each row, by its answer and its index in the group."""
  rows = {}
  for b, answer in enumerate(np.asarray(problem.answer).tolist()):
    tokens = np.asarray(x.action[b])[np.asarray(x.mask[b]) > 0]
    rows[answer, b % GROUP] = tokens.tolist()
  return rows


CARRY = claims.some([(1, 2), (2, 3), (3, 5)], [(2, 3)])


@pytest.mark.slow
@pytest.mark.parametrize('max_carry, extra_groups', CARRY)
def test_carried_rows_equal_rows_that_were_not(max_carry, extra_groups):
  """With frozen parameters, an interruption changes no token."""
  steps = run(max_carry, extra_groups, 8)
  whole = jax.jit(functools.partial(policy().act, group_size=GROUP))
  want, counts, several = {}, {}, 0
  for i in range(8):
    want[i] = whole(params(0), problem_of(i).prompt, keys(i))
  for answer, _, x in rows_of(steps):
    start, n = divmod(answer, 100)
    b = n * GROUP + counts.setdefault(answer, 0)
    counts[answer] += 1
    several += len({*np.asarray(x.version)[np.asarray(x.mask) > 0]}) > 1
    for name in ('action', 'mask', 'truncated'):
      np.testing.assert_array_equal(
        getattr(x, name), getattr(want[start], name)[b]
      )
    np.testing.assert_allclose(x.logp, want[start].logp[b], rtol=0, atol=1e-5)
  assert several > GROUP


@pytest.mark.slow
@pytest.mark.parametrize('max_carry, extra_groups', CARRY)
def test_no_group_is_lost_or_doubled_and_no_token_is_discarded(
  max_carry, extra_groups
):
  steps = run(max_carry, extra_groups, 8, frozen=False)
  emitted = [answer for answer, *_ in rows_of(steps)]
  *_, rollout, _ = steps[-1]
  waiting = np.asarray(rollout.problem.answer).tolist()
  started = [100 * i + n for i in range(8) for n in range(GROUPS)] * GROUP
  assert sorted(emitted + waiting) == sorted(started)
  for i, (_, x, _, info) in enumerate(steps):
    empty = (x.mask.sum(1) == 0).sum()
    assert empty == (extra_groups * GROUP if i == 0 else 0)
    left = steps[i][2]
    assert info['rollout/tokens_carried'] == left.rows.mask.sum()
    if i + 1 < len(steps):
      problem, x, rest, _ = steps[i + 1]
      later = tokens_of(problem, x) | tokens_of(rest.problem, rest.rows)
      for row, tokens in tokens_of(left.problem, left.rows).items():
        assert later[row][: len(tokens)] == tokens


@pytest.mark.slow
@pytest.mark.parametrize('max_carry, extra_groups', CARRY)
def test_no_token_is_older_than_the_bound(max_carry, extra_groups):
  steps = run(max_carry, extra_groups, 8, frozen=False)
  oldest = 0
  for answer, i, x in rows_of(steps):
    version = np.asarray(x.version)[np.asarray(x.mask) > 0]
    assert i - max_carry <= answer // 100 <= version.min()
    assert version.max() <= i
    assert (np.diff(version) >= 0).all()
    oldest = max(oldest, i - version.min())
  assert 0 < oldest <= max_carry


@pytest.mark.slow
@pytest.mark.parametrize('slots', claims.some([2, 7, 18], [7]))
def test_slots_return_and_carry_the_same_rows(slots):
  """Seven slots for 18 rows, of which six are carried; fewer become six."""
  want = run(2, 3, 8, frozen=False)
  got = run(2, 3, 8, frozen=False, slots=slots)
  for leaf, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
    if jnp.issubdtype(leaf.dtype, jnp.floating):
      np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-5)
    else:
      np.testing.assert_array_equal(leaf, other)


@pytest.mark.slow
def test_older_groups_are_emitted_before_newer_ones():
  steps = run(2, 3, 8, frozen=False)
  for problem, *_ in steps[1:]:
    answers = np.asarray(problem.answer)
    assert (np.diff(answers) >= 0).all()


@pytest.mark.slow
def test_a_log_probability_is_of_the_version_that_drew_the_token():
  steps = run(2, 3, 8, frozen=False)
  evaluate = jax.jit(functools.partial(policy().evaluate, group_size=GROUP))
  mixed = 0
  for _, x, *_ in steps:
    mask, version = np.asarray(x.mask), np.asarray(x.version)
    mixed += (np.where(mask > 0, version, version.max()) < version.max()).sum()
    for i in {*version[mask > 0]}:
      logp = evaluate(params(int(i)), x.obs, x.action).logp
      here = (mask > 0) & (version == i)
      np.testing.assert_allclose(
        np.asarray(x.logp)[here], np.asarray(logp)[here], rtol=0, atol=2e-5
      )
  assert mixed


@pytest.mark.slow
def test_without_extra_groups_nothing_changes_to_the_bit():
  empty = partial_completions.allocate(policy(), tiny.problem(GROUPS), GROUP, 0)
  actor = base.Version(params(0), jnp.int32(3))
  args = (actor, empty, problem_of(0), keys(0))
  problem, x, rest, _ = act(1)(*args)
  tiny.assert_same_bits(problem, problem_of(0))
  assert not jax.tree.leaves(rest)[0].size
  plain = act(0)(*args)[1]
  tiny.assert_same_bits(x._replace(arrival=None), plain)


def test_a_device_reads_the_prompt_of_its_part_of_a_group():
  """Twenty rows in groups of two on four devices: each has parts of groups."""
  groups = []

  def resume(*args, group_size, **settings):
    groups.append(group_size)
    return policy().resume(*args, group_size=group_size, **settings)

  *_, carried, _ = run(2, 4, 1)[0]
  assert carried.rows.alive.any()
  args = base.Version(params(0), jnp.int32(1)), carried, problem_of(1), keys(1)
  _, want, _ = partial_completions.continue_(policy(), GROUP, 2, *args)
  divided = functools.partial(
    partial_completions.continue_, policy()._replace(resume=resume), GROUP, 2
  )
  with jax.set_mesh(mesh_lib.mesh(jax.devices()[:4], {'data': 4})):
    _, x, _ = jax.jit(divided)(*args)
  assert groups == [1]
  np.testing.assert_array_equal(x.action, want.action)
  np.testing.assert_allclose(x.logp, want.logp, rtol=0, atol=2e-5)
