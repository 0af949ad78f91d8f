"""Results of a sweep are averaged over seeds, and over nothing else."""

import csv
import json
import pathlib

import numpy as np
import pytest

from rlinf_jax.run_files import run_folder
from rlinf_jax.sweep import grid, results

HIGH = 'workflows.grpo.clip_high = [0.2, 0.28]'
SEED = 'train.train.seed = range(3)'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)


def ran(*over, failed=()):
  """Points whose accuracy is high + seed/100 + step/10 for three steps."""
  points = grid.grid(over, 'runs')
  for point in points:
    if point.name in failed:
      continue
    high = point.values['workflows.grpo.clip_high']
    start = high + point.values.get('train.train.seed', 0) / 100
    values = [start + step / 10 for step in range(3)]
    point.folder.mkdir(parents=True)
    (point.folder / 'metrics.jsonl').write_text(
      ''.join(
        json.dumps({'step': i, 'eval/accuracy': value}) + '\n'
        for i, value in enumerate(values)
      )
    )
    metrics = {'train/loss': 'NaN', 'eval/accuracy': values[-1]}
    (point.folder / 'result.json').write_text(
      json.dumps({'steps': 2, 'seconds': 750.0, 'metrics': metrics})
    )
  return points


@pytest.mark.parametrize('name', ['eval/accuracy', 'eval/success_once'])
def test_points_are_compared_by_their_evaluations(name):
  points = ran(HIGH, SEED, failed=['clip_high=0.2,seed=0'])
  for point in points[1:]:
    path = point.folder / 'result.json'
    path.write_text(path.read_text().replace('eval/accuracy', name))
  assert results.score(points) == name
  assert results.score(points[:1]) == 'eval/accuracy'


def test_the_csv_has_one_row_per_point_with_values_and_metrics():
  points = ran(HIGH, SEED, failed=['clip_high=0.2,seed=1'])
  path = pathlib.Path('results.csv')
  results.write_csv(points, path)
  with path.open(newline='') as file:
    rows = list(csv.DictReader(file))
  assert [row['point'] for row in rows] == [point.name for point in points]
  assert list(rows[4]) == [
    'point',
    'workflows.grpo.clip_high',
    'train.train.seed',
    'steps',
    'seconds',
    'eval/accuracy',
    'train/loss',
  ]
  assert float(rows[4]['eval/accuracy']) == pytest.approx(0.28 + 0.01 + 0.2)
  assert [rows[1][x] for x in ('train.train.seed', 'steps', 'train/loss')] == [
    '1',
    '',
    '',
  ]


def test_the_table_is_means_and_deviations_over_seeds_alone():
  groups = results.settings(ran(HIGH, SEED, failed=['clip_high=0.28,seed=1']))
  columns, rows = results.mean_table(groups, 'eval/accuracy')
  assert columns == ['setting', 'finished', 'eval/accuracy', 'seconds']
  # 0.40, 0.41, 0.42 deviate by 0.01 from their mean; 0.48, 0.50 by 0.01 √2.
  assert rows == [
    ['clip_high=0.2', '3 of 3', '0.410 ± 0.010', '750 ± 0'],
    ['clip_high=0.28', '2 of 3', '0.490 ± 0.014', '750 ± 0'],
  ]


def test_a_setting_of_one_run_has_no_deviation_and_of_none_no_mean():
  groups = results.settings(ran(HIGH, failed=['clip_high=0.28']))
  assert results.mean_table(groups, 'train/loss')[1] == [
    ['clip_high=0.2', '1 of 1', 'nan', '750'],
    ['clip_high=0.28', '0 of 1', '', ''],
  ]


def test_a_run_without_a_finite_value_is_not_hidden_by_the_mean():
  points = ran(HIGH, SEED)
  path = points[2].folder / 'result.json'
  found = json.loads(path.read_text())
  del found['metrics']['eval/accuracy']  # As of a NaN.
  path.write_text(json.dumps(found))
  _, rows = results.mean_table(results.settings(points), 'eval/accuracy')
  assert rows[0][1:3] == ['3 of 3', '0.405 ± 0.007 (of 2)']


def test_small_values_keep_three_digits():
  points = ran('workflows.grpo.clip_high = [1e-5]')
  path = points[0].folder / 'result.json'
  record = {'seconds': 1.0, 'metrics': {'eval/loss': 1.25e-5}}
  path.write_text(json.dumps(record))
  _, rows = results.mean_table(results.settings(points), 'eval/loss')
  assert rows[0][2] == '0.0000125'


def test_seeds_in_several_scopes_are_all_seeds():
  points = grid.grid(
    ['a.seed = [1, 2]', 'b/a.seed = [1]', 'SEED = [3]', 'x.y = [5]'], 'runs'
  )
  assert list(results.settings(points)) == ['y=5']


def test_curves_are_means_where_all_seeds_have_a_value():
  points = ran(HIGH, SEED, failed=['clip_high=0.2,seed=2'])
  shorter = points[0].folder / 'metrics.jsonl'
  shorter.write_text(''.join(shorter.read_text().splitlines(True)[1:]))
  steps, mean, spread = results.curve(points[:3], 'eval/accuracy')
  np.testing.assert_array_equal(steps, [1, 2])
  # Of seeds 0 and 1, 0.01 apart.
  np.testing.assert_allclose(mean, [0.305, 0.405])
  np.testing.assert_allclose(spread, np.full(2, 0.01 / np.sqrt(2)))


def test_a_curve_of_one_point_has_no_spread():
  points = ran(HIGH)
  _, mean, spread = results.curve(points[:1], 'eval/accuracy')
  np.testing.assert_allclose(mean, [0.2, 0.3, 0.4])
  assert np.isnan(spread).all()


def test_names_of_settings_may_have_dollars():
  points = ran(HIGH, SEED)
  groups = {'TRAIN=$A/a_b_c.jsonl,EVAL=$B/d.jsonl': points}
  path = pathlib.Path('dollars.png')
  results.plot(groups, 'eval/accuracy', path)
  assert path.stat().st_size


def test_names_of_settings_may_have_brackets_and_bars(capsys, monkeypatch):
  plot = lambda groups, metric, path: path.touch()
  monkeypatch.setattr(results, 'plot', plot)
  points = ran(HIGH, "a.text = ['[/x]', '[bold]|b']")
  table = results.mean_table(results.settings(points), 'eval/accuracy')
  results.print_table(*table)
  printed = capsys.readouterr().out
  assert 'text=[/x]' in printed and 'text=[bold]|b' in printed
  results.write(points, pathlib.Path('runs'), None)
  written = pathlib.Path('runs/results.md').read_text()
  assert r', text=[bold]\|b | 1 of 1 |' in written


def test_the_plot_has_one_line_per_setting(monkeypatch):
  from matplotlib import figure

  pictures = []
  save = figure.Figure.savefig

  def keep(picture, *args, **kwargs):
    pictures.append(picture)
    save(picture, *args, **kwargs)

  monkeypatch.setattr(figure.Figure, 'savefig', keep)
  path = pathlib.Path('accuracy.png')
  groups = results.settings(ran(HIGH, SEED))
  results.plot(groups, 'eval/accuracy', path)
  (axes,) = pictures[0].axes
  names = [x.get_text() for x in axes.get_legend().get_texts()]
  assert names == ['clip_high=0.2', 'clip_high=0.28']
  np.testing.assert_allclose(axes.lines[1].get_ydata(), [0.29, 0.39, 0.49])
  assert path.read_bytes().startswith(b'\x89PNG')


def test_a_metric_that_no_point_logged_is_refused_with_a_suggestion(folder):
  groups = results.settings(ran(HIGH))
  with pytest.raises(ValueError, match='did you mean `eval/accuracy`'):
    results.plot(groups, 'eval/acuracy', pathlib.Path('x.png'))


def test_of_a_finished_point_the_metrics_alone_are_read_and_once(monkeypatch):
  points, read = ran(HIGH, SEED), []
  # Reports read what is damaged here; a sweep has no use for it.
  (points[0].folder / 'timeline.jsonl').write_text('[1]\n')
  known = run_folder.records

  def records(folder, name):
    read.append((folder.name, name))
    return known(folder, name)

  monkeypatch.setattr(run_folder, 'records', records)
  for _ in range(3):
    results.write(points, pathlib.Path('runs'), None)
  assert sorted(read) == [(x.name, 'metrics.jsonl') for x in points]
