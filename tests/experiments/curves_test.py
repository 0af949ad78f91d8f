"""Curves of several runs."""

import json

import matplotlib.image
import numpy as np
import pytest

from experiments.agents import curves


@pytest.mark.slow
def test_curves_are_read_and_drawn(tmp_path):
  runs = []
  for name, values in (('one', [0.1, 0.9]), ('one', [0.2, 0.8])):
    folder = tmp_path / str(len(runs))
    folder.mkdir()
    lines = [{'step': i * 10, 'eval/x': v} for i, v in enumerate(values)]
    lines.insert(1, {'step': 5, 'train/y': 1.0})
    text = '\n'.join(map(json.dumps, lines))
    (folder / 'metrics.jsonl').write_text(text)
    assert curves.read(folder, 'eval/x') == ([0, 10], values)
    runs.append((name, folder))
  path = tmp_path / 'curves.png'
  curves.draw('eval/x', runs, path)
  rgb = matplotlib.image.imread(path)[..., :3]
  first = np.array([0x1F, 0x77, 0xB4]) / 255  # Of the one name.
  assert (np.abs(rgb - first).max(-1) < 0.01).sum() > 500
