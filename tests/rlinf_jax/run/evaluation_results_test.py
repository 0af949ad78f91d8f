"""The numbers of an evaluation, by set and by task, and its random keys."""

import jax
import jax.numpy as jnp
import numpy as np

from rlinf_jax.data import text_arrays
from rlinf_jax.run import evaluation
from stages import base, metrics


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


def test_completions_stand_beside_the_answers_of_their_problems():
  texts = text_arrays.pack(['seven', '8'])
  problems = base.Problem(np.ones(2), text_arrays.Reference(texts, texts))
  tokens = ('prompt', 'prompt_mask', 'completion', 'completion_mask')
  rows = dict.fromkeys(tokens, np.ones((4, 1), np.int32))
  rows |= dict.fromkeys(('reward', 'correct', 'truncated'), np.ones(4))
  info = {evaluation.SAMPLES: metrics.Rows(rows)}
  source = base.Source(None, None, None, lambda *rows: ['x'] * 4)

  def answers(problems):
    held_out = evaluation.HeldOut([problems], None)
    found = evaluation.completions(info, source, held_out, 0)
    return [record.get('answer') for record in found]

  assert answers(problems) == ['seven', 'seven', '8', '8']
  assert answers(problems._replace(answer=np.ones(2))) == [None] * 4


def test_rows_to_show_are_of_different_problems_and_no_padding():
  weight_B = np.r_[np.ones(9), np.zeros(3)]
  rows = {'reward': np.arange(12), 'text': {'x': np.arange(12)}}
  found = evaluation.few_rows(rows | {'weight': weight_B})
  assert found['reward'].tolist() == [0, 2, 5, 8]
  assert found['text']['x'].tolist() == [0, 2, 5, 8]
  assert evaluation.few_rows(rows)['reward'].tolist() == [0, 3, 7, 11]
  two = evaluation.few_rows({'reward': np.arange(2)})
  assert two['reward'].tolist() == [0, 1]


def test_no_evaluation_has_the_key_of_a_step_or_of_another_batch():
  class Runtime:
    def evaluate(self, batch, key):
      return {'key': jax.random.key_data(key)}

  run, held_out = jax.random.key(7), evaluation.HeldOut([None] * 4, None)
  keys = [
    evaluation.evaluate_batch(Runtime(), held_out, i, run)['key']
    for i in range(4)
  ]
  keys += [jax.random.key_data(jax.random.fold_in(run, i)) for i in range(4)]
  assert len({tuple(key.tolist()) for key in keys}) == 8
