"""Questions about bar charts, and the control with other charts."""

import json

import numpy as np
from PIL import Image

from rlinf_jax.prepare import tiny_vision


def rows(folder, shuffled):
  tiny_vision.write(folder, 'train', 200, held_out=False, shuffled=shuffled)
  lines = (folder / 'train.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


def height(folder, row):
  """The height of the bar that a question asks for, by counting pixels."""
  image = np.asarray(Image.open(folder / row['image']))
  (color,) = (x for x in tiny_vision.COLORS if f' {x} ' in row['prompt'])
  is_bar = (image == tiny_vision.COLORS[color]).all(-1)
  return str(is_bar.any(1).sum() // tiny_vision.UNIT)


def test_an_answer_is_the_height_of_the_bar(tmp_path):
  asked = rows(tmp_path, shuffled=False)
  assert all(height(tmp_path, row) == row['answer'] for row in asked)
  assert {row['answer'] for row in asked} == set('12345')


def test_shuffled_charts_say_nothing_of_the_answers(tmp_path):
  asked = rows(tmp_path / 'asked', shuffled=False)
  shuffled = rows(tmp_path / 'shuffled', shuffled=True)
  rest = [
    [{k: x for k, x in row.items() if k != 'image'} for row in some]
    for some in (asked, shuffled)
  ]
  assert rest[0] == rest[1]  # The same questions with the same answers,
  paths = [sorted(row['image'] for row in some) for some in (asked, shuffled)]
  assert paths[0] == paths[1]  # and the same charts,
  folder = tmp_path / 'shuffled'
  right = [height(folder, row) == row['answer'] for row in shuffled]
  assert 0.1 < np.mean(right) < 0.3  # of which one in five has the answer.
