"""Groups that a step leaves unfinished, and that later ones go on with."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.ir import plan as plan_lib
from rlinf_jax import train as trainer
from rlinf_jax.run import checkpoint
import stages
from stages import base, metrics, workflows
from stages.language import language_model, partial_rollout
from stages.learn import optimizers
from tests.rlinf_jax.runtime import invariance_test, random_plans_test
import tiny

KEY = jax.random.key(0)
GROUP, GROUPS, LENGTH = 2, 6, 24
STOP = (0, 1, 2)


@functools.cache
def policy(dtype='float32', length=LENGTH):
  """Rows of a few tokens, and now and then one of many."""
  config = dataclasses.replace(tiny.CONFIG, dtype=dtype)
  return language_model.policy(config, response_length=length, stop=STOP)


def draft_of(lengths, ended, T=4) -> base.Completions:
  """Rows of so many tokens."""
  length_B = jnp.array(lengths)
  mask_BT = (jnp.arange(T)[None] < length_B[:, None]).astype(jnp.float32)
  return base.Completions(
    mask_BT.astype(jnp.int32), -mask_BT, mask_BT, ~jnp.array(ended, bool)
  )


def test_the_first_groups_that_have_ended_go_on_and_others_wait_in_order():
  # Groups of two: one unfinished, ended, ended by length, unfinished, ended.
  draft = draft_of(
    [2, 3, 1, 2, 4, 4, 2, 4, 3, 1], [1, 0, 1, 1, 1, 0, 0, 1, 1, 1]
  )
  out, rest = partial_rollout.split_finished(draft, 2, 2)
  assert out.tolist() == [2, 3, 4, 5]
  assert rest.tolist() == [0, 1, 6, 7, 8, 9]
  out, rest = partial_rollout.split_finished(draft, 2, 3)
  assert out.tolist() == [2, 3, 4, 5, 8, 9]


def rollout_of(lengths, ended) -> partial_rollout.Rollout:
  """Rows of so many tokens, which their answers number."""
  draft = draft_of(lengths, ended)
  B, T = draft.mask.shape
  prompt = base.Prompt(jnp.ones((B, 1), jnp.int32), jnp.ones((B, 1), jnp.int32))
  return partial_rollout.Rollout(
    base.Problem(prompt, jnp.arange(B)),
    jnp.zeros((B, 2), jnp.uint32),
    draft,
    jnp.zeros((B, T), jnp.int32),
    jnp.zeros(B, jnp.int32),
  )


def test_new_groups_come_after_carried_ones_and_nobody_asks_what_another_asks():
  # The last is somebody of whom there is no token yet.
  old = rollout_of([3, 0, 0, 2, 0, 0], [0, 1, 1, 0, 0, 0])
  new = rollout_of([0, 0], [0, 0]).problem
  new = new._replace(answer=jnp.array([70, 71]))
  slots = partial_rollout.append(old, new, jax.random.split(KEY, 2))
  assert slots.problem.answer.tolist() == [0, 70, 70, 3, 4, 5, 70, 71]
  assert slots.completions.mask.sum(1).tolist() == [3, 0, 0, 2, 0, 0, 0, 0]
  assert slots.completions.alive.tolist() == [True, False, False] + [True] * 5


def test_what_is_told_of_rows_that_several_steps_drew():
  version = np.array([[2, 2, 3], [3, 3, 0], [1, 2, 2], [0, 0, 0]])
  mask = np.float32([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
  told = partial_rollout.carry_metrics(
    jnp.array(version), jnp.array(mask), jnp.ones((2, 3))
  )
  assert told['rollout/continued_fraction'].value()[''] == pytest.approx(1 / 3)
  assert told['rollout/tokens_carried'] == 6


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
    partial_rollout.check(policy(), max_carry, extra_groups)


def test_a_policy_that_cannot_resume_is_refused():
  engine = policy()._replace(resume=None)
  with pytest.raises(ValueError, match='this one has no `resume`'):
    partial_rollout.partial_rollouts(engine, 2, max_carry=1, extra_groups=1)


def test_as_many_extra_groups_as_a_batch_has_are_refused():
  with pytest.raises(ValueError, match='extra_groups=6 and 6 groups'):
    partial_rollout.allocate(policy(), tiny.problem(rows=6), GROUP, 6)


def asked(i) -> base.Problem:
  """The problems of step i, which their answers number."""
  problem = tiny.problem(rows=GROUPS, seed=i)
  problem = problem._replace(answer=problem.answer + 100 * i)
  return jax.tree.map(lambda x: jnp.repeat(x, GROUP, axis=0), problem)


def keys(i):
  return stages.keys(jax.random.fold_in(KEY, i), asked(i).prompt)


@functools.cache
def params(i):
  """Parameters that an i-th update might have made."""
  first, other = (policy().init(jax.random.key(k)) for k in (5, 6))
  return jax.tree.map(lambda x, y: x + 0.1 * i * y, first, other)


@functools.cache
def acts(partial):
  return partial_rollout.act(policy(), GROUP, partial)


@functools.cache
def acted(partial, spare, steps, frozen=True):
  """What steps hand on, and what each of them leaves."""
  rollout = partial_rollout.allocate(
    policy(), tiny.problem(GROUPS), GROUP, spare
  )
  made = []
  for i in range(steps):
    actor = base.Version(params(0 if frozen else i), jnp.int32(i))
    problem, x, rollout, told = acts(partial)(actor, rollout, asked(i), keys(i))
    made.append((problem, x, rollout, told))
  return made


def rows_of(made):
  """Every row that was handed on: answer, step, row of its step, experience."""
  for i, (problem, x, *_) in enumerate(made):
    for b, answer in enumerate(np.asarray(problem.answer)):
      if x.mask[b].any():
        yield int(answer), i, jax.tree.map(lambda x, b=b: x[b], x)


def said(problem, x):
  """The tokens of each row, by its answer and its place in the group."""
  made = {}
  for b, answer in enumerate(np.asarray(problem.answer).tolist()):
    tokens = np.asarray(x.action[b])[np.asarray(x.mask[b]) > 0]
    made[answer, b % GROUP] = tokens.tolist()
  return made


PARTIAL = [(1, 2), (2, 3), (3, 5)]


@pytest.mark.slow
@pytest.mark.parametrize('partial, spare', PARTIAL)
def test_rows_that_were_carried_are_rows_that_were_not(partial, spare):
  """With frozen parameters, an interruption changes no token."""
  made = acted(partial, spare, 8)
  whole = jax.jit(functools.partial(policy().act, group_size=GROUP))
  want, seen, several = {}, {}, 0
  for i in range(8):
    want[i] = whole(params(0), asked(i).prompt, keys(i))
  for answer, _, x in rows_of(made):
    begun, n = divmod(answer, 100)
    b = n * GROUP + seen.setdefault(answer, 0)
    seen[answer] += 1
    several += len({*np.asarray(x.version)[np.asarray(x.mask) > 0]}) > 1
    for name in ('action', 'mask', 'truncated'):
      np.testing.assert_array_equal(
        getattr(x, name), getattr(want[begun], name)[b]
      )
    np.testing.assert_allclose(x.logp, want[begun].logp[b], rtol=0, atol=1e-5)
  assert several > GROUP


@pytest.mark.slow
@pytest.mark.parametrize('partial, spare', PARTIAL)
def test_no_group_is_lost_none_comes_twice_and_no_token_is_thrown_away(
  partial, spare
):
  made = acted(partial, spare, 8, frozen=False)
  handed = [answer for answer, *_ in rows_of(made)]
  *_, rollout, _ = made[-1]
  waiting = np.asarray(rollout.problem.answer).tolist()
  begun = [100 * i + n for i in range(8) for n in range(GROUPS)] * GROUP
  assert sorted(handed + waiting) == sorted(begun)
  for i, (_, x, _, told) in enumerate(made):
    empty = (x.mask.sum(1) == 0).sum()
    assert empty == (spare * GROUP if i == 0 else 0)
    left = made[i][2]
    assert told['rollout/tokens_carried'] == left.completions.mask.sum()
    if i + 1 < len(made):
      problem, x, rest, _ = made[i + 1]
      later = said(problem, x) | said(rest.problem, rest.completions)
      for row, tokens in said(left.problem, left.completions).items():
        assert later[row][: len(tokens)] == tokens


@pytest.mark.slow
@pytest.mark.parametrize('partial, spare', PARTIAL)
def test_no_token_is_older_than_the_bound(partial, spare):
  made = acted(partial, spare, 8, frozen=False)
  oldest = 0
  for answer, i, x in rows_of(made):
    version = np.asarray(x.version)[np.asarray(x.mask) > 0]
    assert i - partial <= answer // 100 <= version.min()
    assert version.max() <= i
    assert (np.diff(version) >= 0).all()
    oldest = max(oldest, i - version.min())
  assert 0 < oldest <= partial


@pytest.mark.slow
def test_older_groups_are_handed_on_before_newer_ones():
  made = acted(2, 3, 8, frozen=False)
  for problem, *_ in made[1:]:
    answers = np.asarray(problem.answer)
    assert (np.diff(answers) >= 0).all()


@pytest.mark.slow
def test_a_log_probability_is_of_the_version_that_drew_the_token():
  made = acted(2, 3, 8, frozen=False)
  evaluate = jax.jit(functools.partial(policy().evaluate, group_size=GROUP))
  mixed = 0
  for _, x, *_ in made:
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
def test_where_nothing_is_carried_it_is_what_it_was_without():
  """Of no spare groups, to the bit."""
  nobody = partial_rollout.allocate(policy(), tiny.problem(GROUPS), GROUP, 0)
  actor = base.Version(params(0), jnp.int32(3))
  given = (actor, nobody, asked(0), keys(0))
  problem, x, rest, _ = acts(1)(*given)
  tiny.assert_same_bits(problem, asked(0))
  assert not jax.tree.leaves(rest)[0].size
  plain = acts(0)(*given)[1]
  tiny.assert_same_bits(x._replace(arrival=None), plain)


@functools.cache
def grpo(dtype='float32', **kwargs):
  kwargs = {
    'optimizer': optimizers.adamw(1e-2),
    'rollouts': functools.partial(
      partial_rollout.partial_rollouts, max_carry=1, extra_groups=3
    ),
  } | kwargs
  return workflows.grpo(
    policy(dtype, length=12),
    invariance_test.even if dtype == 'float64' else tiny.even,
    group_size=4,
    **kwargs,
  )


def read(info):
  return metrics.read(jax.device_get(info))[0]


@pytest.mark.slow
def test_a_step_learns_from_rows_that_others_have_begun():
  workflow = grpo()
  state = trainer.first_state(workflow, KEY, tiny.problem())
  rewards, continued, gaps = [], [], []
  for i in range(30):
    key = jax.random.fold_in(KEY, i)
    state, info = workflow.step(state, tiny.problem(seed=i), key)
    numbers = read(info)
    rewards.append(numbers['rollout/reward_mean'])
    continued.append(numbers['rollout/continued_fraction'])
    assert numbers['rollout/staleness_max'] <= 1
    gaps.append(numbers['rollout/logprob_gap_max'])
  assert rewards[0] < 0.65 < 0.9 < np.mean(rewards[-3:])
  assert max(continued) > 0.1
  # Of one version, and then of two.
  assert gaps[0] < 1e-4 < 1e-2 < gaps[1]


@pytest.mark.slow
def test_what_is_carried_grows_older_by_the_lag_too():
  workflow = grpo(staleness=1)
  state, stale = trainer.first_state(workflow, KEY, tiny.problem()), []
  for i in range(4):
    state, info = workflow.step(state, tiny.problem(seed=i), jax.random.key(i))
    stale.append(read(info)['rollout/staleness_max'])
  assert stale == [0, 1, 2, 2]


@pytest.mark.slow
def test_what_is_carried_is_kept_in_a_checkpoint(tmp_path):
  workflow = grpo()
  state = trainer.first_state(workflow, KEY, tiny.problem())
  for i in range(2):
    state, _ = workflow.step(state, tiny.problem(seed=i), jax.random.key(i))
  folder = checkpoint.Checkpoints(tmp_path, 1)
  folder.save(checkpoint.CheckpointState(2, state, {'n': np.array(2)}, {}))
  folder.close()
  fresh = trainer.first_state(workflow, jax.random.key(7), tiny.problem())
  folder = checkpoint.Checkpoints(tmp_path, 1)
  saved = folder.load(fresh, {'n': np.array(0)})
  folder.close()
  given = tiny.problem(seed=2), jax.random.key(2)
  tiny.assert_same_bits(
    workflow.step(saved.state, *given), workflow.step(state, *given)
  )


PLANS = {
  'places': {
    'places': {p: {'devices': [i]} for i, p in enumerate('abc')},
    'stages': {'generate': 'a', 'reward': 'b', 'proximal_logp': 'b', '*': 'c'},
    'offload': ['apply'],
  },
  'pieces and a mesh': {
    'places': {
      'a': {'devices': [0, 1], 'axes': [['data', 2]]},
      'b': {'devices': [2, 3], 'axes': [['fsdp', 2]]},
    },
    'stages': {'generate': 'a', '*': 'b'},
    'pieces': 2,
  },
}


@functools.cache
def eager():
  """Three steps as arrays; the last hands on what an earlier one began."""
  workflow = grpo('float64', num_minibatches=2, minibatch_by='arrival')
  batches = [tiny.problem(seed=i) for i in range(3)]
  first = state = trainer.first_state(workflow, KEY, batches[0])
  want = []
  for i, batch in enumerate(batches):
    state, info = workflow.step(state, batch, random_plans_test.key(i))
    want.append((tiny.arrays(state), tiny.arrays(info)))
  assert read(info)['rollout/continued_fraction'] > 0
  return workflow, first, batches, want


@pytest.mark.slow
@pytest.mark.parametrize('sketch', PLANS.values(), ids=PLANS)
def test_no_plan_changes_what_is_carried(sketch, in_float64):
  workflow, first, batches, want = eager()
  flow = tiny.trace(workflow, batches[0])
  plan = plan_lib.parse(sketch, flow.stages)
  got = random_plans_test.run(plan, workflow, first, batches)
  random_plans_test.compare(plan, got, want)
