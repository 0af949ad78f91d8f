"""Texts of questions as arrays of bytes."""

import tracemalloc

import numpy as np

from rlinf_jax.data import text_arrays


def test_texts_survive_as_bytes():
  texts = ['', 'é ü', '数', 'x' * 30]
  assert text_arrays.unpack(text_arrays.pack(texts)) == texts
  rows = text_arrays.Texts(texts)[np.arange(len(texts))]
  np.testing.assert_array_equal(rows, text_arrays.pack(texts))


def test_one_long_answer_takes_no_room_of_others():
  texts = ['7'] * 4000 + ['x' * 200_000]
  tracemalloc.start()
  kept = text_arrays.Texts(texts)
  batch = kept[[4000, 0]]
  _, most = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert text_arrays.unpack(batch) == [texts[-1], '7']
  assert batch.shape == kept[[0, 1]].shape  # So that a step is compiled once.
  assert most < 3_000_000
