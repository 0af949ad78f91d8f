"""The numbers of an evaluation, by set and by task."""

import jax.numpy as jnp

from rlinf_jax.run import evaluation
from stages import metrics


def test_a_term_of_the_reward_is_a_metric_of_its_set_and_no_task():
  one = jnp.array([1.0, 0.0])
  info = {
    'eval/accuracy': metrics.score(one),
    'eval/reward/format': metrics.mean(one),
    'eval/reach/success_once': metrics.score(one),
  }
  found = evaluation.results([info], None)
  assert {name: {*values} for name, values in found.items()} == {
    'reach': {'success_once'},
    'all': {'accuracy', 'reward/format'},
  }
