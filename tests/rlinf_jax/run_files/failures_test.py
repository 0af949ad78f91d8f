"""Problems of a run are listed in its last lines and in its report."""

import json

import numpy as np
import pytest

from rlinf_jax.report import report, summary
from rlinf_jax.run import console, run_log
from rlinf_jax.run_files import failures, run_folder, writers


def write(folder, *records):
  log = writers.json_lines(folder / 'metrics.jsonl')
  for step, values in enumerate(records):
    log.write(step, values)
  log.close()


def last_lines(folder):
  return console.format_summary(folder, 60.0, 'report.html')


CASES = [
  ({'train/skipped': 1.0}, 'In 1 step an update was skipped, as its gradient'),
  ({'env/failed': 3.0}, '3 episodes were lost, as a simulator failed.'),
  ({'eval/failed': 1.0}, '1 episode was lost, as a simulator failed.'),
  ({'rollout/env_failed': 2.0}, '2 conversations were lost, as an environm'),
  ({'rollout/reward/failed': 0.5}, 'A reward failed in 1 step or evaluation.'),
  ({'eval/reward/failed': 0.5}, 'A reward failed in 1 step or evaluation.'),
]


@pytest.mark.parametrize(('values', 'words'), CASES)
def test_a_failure_in_the_metrics_is_told_at_the_end(values, words, tmp_path):
  write(tmp_path, {'train/loss': 1.0}, {'train/loss': 1.0} | values)
  assert words in last_lines(tmp_path)
  assert words in summary.describe(run_folder.read(tmp_path))
  report.write(tmp_path)
  assert words in (tmp_path / 'report.html').read_text()


def test_means_of_nothing_hide_no_failure(tmp_path):
  names = 'train/skipped', 'env/failed', 'rollout/reward/failed'
  write(tmp_path, dict.fromkeys(names, np.nan), dict.fromkeys(names, 1.0))
  assert [words.split()[0] for words in failures.read(tmp_path)] == [
    'In', '1', 'A',
  ]  # fmt: skip


def test_a_run_without_failures_has_no_such_line(tmp_path):
  write(tmp_path, {'env/failed': 0.0, 'train/skipped': 0.0, 'train/loss': 1.0})
  assert failures.read(tmp_path) == []
  assert 'problems' not in last_lines(tmp_path)


def test_a_video_that_cannot_be_written_is_told_at_the_end(tmp_path, capsys):
  log = run_log.RunLog(tmp_path, None, 5, 0, None)
  (tmp_path / 'videos').write_text('not a folder')
  log.write_video(2, {'a': np.zeros((1, 3, 8, 8, 3), np.uint8)})
  log.notice(4, 'Process 1 died and was replaced.')
  log.write_metrics(4, {'train/loss': 1.0})
  log.close()
  assert 'There is no video of step 2' in capsys.readouterr().out
  lines = (tmp_path / failures.FILE).read_text().splitlines()
  assert [json.loads(x)['step'] for x in lines] == [2, 4]
  text = '2 notices of the run: see notices.jsonl. The last, at step 4: Process'
  assert text in last_lines(tmp_path)
  # A run that goes on from step 3 makes the second notice again.
  log = run_log.RunLog(tmp_path, None, 5, 3, None)
  log.close()
  assert 'One notice of the run: see notices.jsonl. The last, at step 2: ' in (
    last_lines(tmp_path)
  )


def test_a_full_disk_does_not_hide_why_a_run_ends(tmp_path):
  def full():
    raise OSError('No space left on device')

  closed, log = [], run_log.RunLog(tmp_path, None, 5, 0, None)
  log._timeline.close()
  log._timeline = writers.Writer(None, full)
  log._predictions.close()
  log._predictions = writers.Writer(None, lambda: closed.append('file'))
  with pytest.raises(KeyError), log:
    raise KeyError
  with pytest.raises(OSError, match='No space'), log:
    pass
  assert closed == ['file', 'file']


def test_the_return_is_shown_where_no_episode_ever_succeeds(tmp_path):
  none = {'eval/success_once': 0.0, 'env/success_once': 0.0}
  write(
    tmp_path,
    none | {'eval/return': 20.0, 'env/return': 21.0},
    none | {'eval/return': 475.0, 'env/return': 470.0},
  )
  run = run_folder.read(tmp_path)
  assert summary.without_success(run).metric == 'eval/return'
  assert summary.describe(run).startswith(
    'No episode succeeded. Held-out return rose from 20 to 475'
  )
  report.write(tmp_path)
  page = (tmp_path / 'report.html').read_text()
  assert '<b>20</b><i>→</i><b>475</b>' in page
  assert 'return   20.00 -> 475.00 (held out)' in last_lines(tmp_path)


@pytest.mark.parametrize('successes', [(0.0, 0.5), (0.0, 0.0)])
def test_success_stands_alone_where_returns_do_not_tell_more(
  successes, tmp_path
):
  write(
    tmp_path,
    *({'eval/success_once': x, 'eval/return': x} for x in successes),
  )
  run = run_folder.read(tmp_path)
  assert summary.headline(run).metric == 'eval/success_once'
  assert summary.without_success(run) is None
