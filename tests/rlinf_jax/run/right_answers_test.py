"""The right answers that are shown beside samples."""

import numpy as np

from rlinf_jax.data import text_arrays
from rlinf_jax.run import right_answers
from stages import base


def problems(rows, answers, left=True):
  """Prompts of these tokens, padded to five."""
  pad = lambda row: [0] * (5 - len(row))
  fill = lambda row, own: pad(row) + own if left else own + pad(row)
  token = np.array([fill(row, row) for row in rows])
  mask = np.array([fill(row, [1] * len(row)) for row in rows])
  packed = text_arrays.pack(answers)
  return base.Problem(
    base.Prompt(token, mask), text_arrays.Reference(packed, packed)
  )


def found(rows, *batches):
  prompt = problems(rows, ['x'] * len(rows), left=False).prompt
  samples = {'prompt': prompt.token, 'prompt_mask': prompt.mask}
  return right_answers.by_prompt(samples, batches)


def test_an_answer_is_that_of_the_same_prompt_in_any_order_and_padding():
  one = problems([[1, 2], [0, 1, 2], [2]], ['a', 'b', 'c'])
  other = problems([[7, 7, 7, 7, 7]], ['d'])
  rows = [[2], [7] * 5, [1, 2], [2], [0, 1, 2]]
  assert found(rows, one, other) == ['c', 'd', 'a', 'c', 'b']


def test_there_is_none_for_an_unknown_prompt_or_several_answers():
  batch = problems([[1], [1], [2], [2]], ['a', 'b', 'c', 'c'])
  assert found([[1], [2], [3], [1, 2]], batch) == [None, 'c', None, None]


def test_there_is_none_where_answers_are_no_texts():
  batch = problems([[1]], ['a'])._replace(answer=np.ones(1))
  assert found([[1]], batch) == [None]
  assert right_answers.texts(batch) is None
  assert found([[1]], {'env': np.ones(1)}) == [None]
