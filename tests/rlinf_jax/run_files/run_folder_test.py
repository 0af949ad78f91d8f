import json
import tracemalloc

import pytest

import fake_run
from rlinf_jax.report.html import samples_html
from rlinf_jax.run_files import run_folder


def test_all_seconds_of_a_finished_run_are_listed(tmp_path):
  run = run_folder.read(fake_run.make_run(tmp_path / 'r', steps=40))
  times = run_folder.stage_seconds(run)
  assert sum(times.values()) == pytest.approx(run.result['seconds'], rel=1e-3)
  assert list(times)[:2] == ['generate', 'gradient']
  assert times['outside steps'] == pytest.approx(4.0)


def test_stages_that_overlap_leave_no_rest(tmp_path):
  lines = [{'step': 1, 'time/step': 1.0, 'time/a': 0.9, 'time/b': 0.8}]
  fake_run.write_lines(tmp_path / 'metrics.jsonl', lines)
  run = run_folder.read(tmp_path)
  assert run_folder.stage_seconds(run) == {'a': 0.9, 'b': 0.8}


def test_the_duration_of_an_unfinished_run_is_estimated(tmp_path):
  folder = fake_run.make_run(tmp_path / 'r', steps=5, finished=False)
  run = run_folder.read(folder)
  last = json.loads((folder / 'timeline.jsonl').read_text().splitlines()[-1])
  assert run_folder.seconds(run) == pytest.approx(last['end'], rel=0.01)
  assert run_folder.steps(run) == 5


def test_the_later_record_of_a_step_counts(tmp_path):
  lines = [{'step': 2, 'a': 1.0}, {'step': 1, 'a': 3.0}, {'step': 2, 'a': 5.0}]
  fake_run.write_lines(tmp_path / 'metrics.jsonl', lines)
  series = run_folder.read(tmp_path).series['a']
  assert series.step.tolist() == [1, 2]
  assert series.value.tolist() == [3.0, 5.0]


def test_the_warm_up_is_read_with_the_run(tmp_path):
  run = run_folder.read(fake_run.make_run(tmp_path / 'r', steps=2))
  assert run_folder.steps(run.warm_start) == 300
  assert run.warm_start.warm_start is None


def test_a_folder_without_metrics_is_refused(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text('')
  with pytest.raises(FileNotFoundError, match='no metrics to report'):
    run_folder.read(tmp_path)


def test_a_report_of_a_long_run_holds_what_it_draws(tmp_path):
  """Memory of reading is that of the last steps, however long the run."""
  folder = fake_run.make_run(tmp_path / 'r', steps=8, warm_start=False)
  few = traced(folder)
  timeline, samples = folder / 'timeline.jsonl', folder / 'samples.jsonl'
  lines = [
    {**span, 'step': step, 'start': step, 'end': step + 0.5}
    for step in range(5_000)
    for span in map(json.loads, timeline.read_text().splitlines()[:5])
  ]
  fake_run.write_lines(timeline, lines)
  known = list(map(json.loads, samples.read_text().splitlines()))[:4]
  long = [{**x, 'step': step} for step in range(2_000) for x in known]
  fake_run.write_lines(samples, long)
  assert timeline.stat().st_size + samples.stat().st_size > 3e6
  many = traced(folder)
  run = run_folder.read(folder)
  assert sorted({x['step'] for x in run.timeline.last}) == [*range(4996, 5000)]
  assert run.timeline.end == 4999.5
  assert run.timeline.stages == {x['stage'] for x in lines}
  assert many - few < 5e5


def traced(folder) -> int:
  """The most bytes that reading a run and showing its samples take."""
  tracemalloc.start()
  samples_html.samples(run_folder.read(folder))
  most = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  return most
