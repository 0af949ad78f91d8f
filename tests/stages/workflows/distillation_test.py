"""On-policy distillation: its advantage, its effect, and who may teach."""

import jax
import numpy as np
import optax
import pytest

import own_data
from rlinf_jax.config import config
from stages import base, workflows
from stages.language import huggingface, sample, tokens
from stages.learn import optimizers
from stages.workflows.distillation import (
  less_kl,
  teacher_advantage,
  teacher_gap,
)
import tiny
from tiny import read

KEY = jax.random.key(0)


def test_each_token_answers_for_itself(in_float64):
  rng = np.random.default_rng(0)
  logp_BT, teacher_BT = rng.normal(size=(2, 4, 5))
  mask_BT = (np.arange(5)[None] < np.array([[5], [1], [0], [3]])).astype(float)
  want_BT = np.zeros((4, 5))
  for b, t in np.argwhere(mask_BT > 0):
    want_BT[b, t] = teacher_BT[b, t] - logp_BT[b, t]
  logp_BT = np.where(mask_BT > 0, logp_BT, np.nan)
  got_BT = teacher_advantage(teacher_BT, logp_BT, mask_BT)
  np.testing.assert_array_equal(got_BT, want_BT)
  gap = read(teacher_gap(got_BT, mask_BT))['rollout/kl_teacher']
  np.testing.assert_allclose(gap, -want_BT.sum() / 9, rtol=1e-12)


def test_a_kl_penalty_draws_each_token_to_the_reference(in_float64):
  rng = np.random.default_rng(0)
  logp_BT, teacher_BT, ref_BT = rng.normal(size=(3, 4, 5))
  mask_BT = (np.arange(5)[None] < np.array([[5], [1], [0], [3]])).astype(float)
  logp_BT = np.where(mask_BT > 0, logp_BT, np.nan)
  advantage_BT = teacher_advantage(teacher_BT, logp_BT, mask_BT)
  got_BT = less_kl(0.5, advantage_BT, logp_BT, ref_BT, mask_BT)
  want_BT = np.zeros((4, 5))
  for b, t in np.argwhere(mask_BT > 0):
    # 1.5 times the log-ratio to π ∝ (π_teacher √π_ref)^(1 / 1.5).
    mixed = (teacher_BT[b, t] + 0.5 * ref_BT[b, t]) / 1.5
    want_BT[b, t] = 1.5 * (mixed - logp_BT[b, t])
  np.testing.assert_allclose(got_BT, want_BT, rtol=1e-12)


@pytest.mark.slow
def test_a_stale_student_is_updated_from_where_it_is_now():
  late = distillation(optimizers.adamw(1e-2), staleness=1, kl_coef=0.1)
  state = late.init(KEY)
  for i in range(3):
    state, info = late.step(state, tiny.problem(), jax.random.key(i))
    numbers = read(info)
    assert numbers['rollout/staleness'] == min(i, 1)
    # Ratios are to the version before the update, not to the one that sampled.
    np.testing.assert_allclose(numbers['train/ratio_max'], 1.0, rtol=1e-5)
    assert (numbers['rollout/logprob_gap_max'] > 1e-4) == (i > 0)
    assert (numbers['train/kl_reference'] > 1e-6) == (i > 0)


def distillation(optimizer, policy=None, **kwargs):
  student = tiny.policy(length=4)
  other = student._replace(init=lambda key: student.init(jax.random.key(5)))
  return workflows.distillation(
    policy or student, other, tiny.even, optimizer, group_size=8, **kwargs
  )


@pytest.mark.slow
def test_a_student_becomes_its_teacher():
  workflow = distillation(optimizers.adamw(1e-2))
  state, gaps = workflow.init(KEY), []
  first = tiny.arrays(state.teacher)
  for i in range(30):
    key = jax.random.fold_in(KEY, i)
    state, info = workflow.step(state, tiny.problem(), key)
    gaps.append(read(info)['rollout/kl_teacher'])
  assert gaps[0] > 0.5 and np.mean(gaps[-5:]) < 0.5 * gaps[0]
  tiny.assert_same_bits(state.teacher, first)


@pytest.mark.slow
def test_a_teacher_changes_nothing_of_a_student_that_is_its_equal():
  student = tiny.policy(length=4)
  workflow = workflows.distillation(
    student, student, tiny.even, optax.sgd(1.0), group_size=2
  )
  state = workflow.init(KEY)
  after, info = workflow.step(state, tiny.problem(), KEY)
  assert abs(read(info)['rollout/kl_teacher']) < 1e-5
  teacher = state.teacher[base.FROZEN]
  assert tiny.distance(after.actor.params, teacher) < 1e-4


def test_a_teacher_scores_under_what_its_student_samples_from():
  cold = tiny.policy(length=4, sampling=sample.Sampling(temperature=0.5))
  with pytest.raises(ValueError, match='give both the same sampling'):
    distillation(optax.sgd(1.0), cold)
  workflows.distillation(cold, cold, tiny.even, optax.sgd(1.0), group_size=2)


@pytest.mark.parametrize('job', ['arithmetic', 'math'])
def test_a_recipe_gives_the_teacher_the_sampling_of_its_student(job, tmp_path):
  names = {'math': ['MODEL', 'TRAIN', 'EVAL'], 'arithmetic': []}[job]
  bindings = [f'{name} = "none"' for name in [*names, 'TEACHER']]
  bindings += ['sample.Sampling.temperature = 0.5']
  recipe = f'gin_configs/distillation_{job}.gin'
  config.parse([recipe], bindings, str(tmp_path))
  student, teacher = (
    config.binding(function, 'sampling')
    for function in (huggingface.policy, huggingface.teacher)
  )
  assert student == teacher == sample.Sampling(temperature=0.5)


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path):
  student = own_data.model(tmp_path)
  tokens.train_tokenizer(tmp_path / 'other', ['abc'], 9)
  with pytest.raises(ValueError, match='tokens differ.* of the same family'):
    huggingface.teacher(str(tmp_path / 'other'), student=student)
  teacher = huggingface.teacher(student, student=student)
  assert teacher.evaluate is not None
