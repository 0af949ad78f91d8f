"""Settings of workflows that would train nothing, or are read by nothing."""

import jax.numpy as jnp
import optax
import pytest

from stages import workflows
from stages.language import sample
from stages.learn import advantages, losses
import tiny


def grpo(**settings):
  return workflows.grpo(
    tiny.policy(), tiny.even, optax.sgd(1.0), group_size=2, **settings
  )


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'dual_clip': 0.5}, 'dual_clip = 0.5 would cut the gradient'),
    ({'dual_clip': 1.0}, 'dual_clip = 1.0 would cut the gradient'),
    ({'importance_cap': 0.5}, 'importance_cap = 0.5 is below the weight'),
    *(
      (
        {'greedy_baseline': True, 'advantage': advantage},
        f'{advantage.__name__} subtracts again',
      )
      for advantage in (
        advantages.group_relative,
        advantages.group_centered,
        advantages.leave_one_out,
      )
    ),
  ],
)
def test_what_would_silence_learning_is_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    grpo(**settings)


def test_their_bounds_are_accepted():
  grpo(importance_cap=1.0, importance_bound=losses.masked)
  grpo(greedy_baseline=True, advantage=advantages.no_baseline)


@pytest.mark.parametrize('make', [workflows.dpo, workflows.sft])
def test_likelihoods_are_of_the_whole_distribution(make):
  arguments = {'optimizer': optax.sgd(1.0)}
  if make is workflows.sft:
    arguments['verify'] = None
  make(tiny.policy(sampling=sample.Sampling()), **arguments)
  for draw in (sample.Sampling(temperature=0.5), sample.Sampling(top_k=1)):
    with pytest.raises(ValueError, match='leave its `sampling` out'):
      make(tiny.policy(sampling=draw), **arguments)


def test_a_group_of_one_has_no_advantage():
  with pytest.raises(ValueError, match='group_centered'):
    advantages.group_centered(jnp.ones(1))


def test_a_buffer_that_reaches_over_the_completion_is_refused():
  limit = tiny.LENGTH
  for buffer in (limit, 2 * limit):
    workflow = workflows.dapo(
      tiny.policy(),
      tiny.even,
      optax.sgd(1.0),
      group_size=2,
      max_rounds=1,
      overlong_buffer=buffer,
    )
    with pytest.raises(ValueError, match=f'overlong_buffer = {buffer}'):
      tiny.trace(workflow, tiny.problem())
