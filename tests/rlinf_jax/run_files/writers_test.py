import json
import math
import os
import subprocess
import sys
import types

import pytest

from rlinf_jax.run_files import writers


def write_steps(path, steps, resume_step=None):
  writer = writers.json_lines(path, resume_step)
  for step in steps:
    writer.write(step, {'train/loss': 1.0 / step})
  writer.close()


def test_a_line_is_on_disk_before_write_returns(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  writer = writers.json_lines(path)
  writer.write(1, {'train/loss': 0.1})
  assert path.read_text() == '{"step": 1, "train/loss": 0.1}\n'
  writer.close()


def test_numbers_that_are_not_finite_stay_json_and_read_back(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  writer = writers.json_lines(path)
  writer.write(3, {'a': math.nan, 'b': math.inf, 'c': -math.inf})
  writer.close()

  def refuse(word):
    raise AssertionError(f'{word} is not JSON')

  record = json.loads(path.read_text(), parse_constant=refuse)
  assert math.isnan(float(record['a']))
  assert float(record['b']) == math.inf
  assert float(record['c']) == -math.inf


def test_text_is_written_unchanged(tmp_path):
  path = tmp_path / 'samples.jsonl'
  writer = writers.json_lines(path)
  writer.write(1, {'completion': 'line\u2028one\n"two" é', 'reward': 1.0})
  writer.close()
  (record,) = writers.records(path)
  assert record['completion'] == 'line\u2028one\n"two" é'


def test_resuming_gives_the_bytes_of_a_run_that_never_stopped(tmp_path):
  straight, resumed = tmp_path / 'straight', tmp_path / 'resumed'
  write_steps(straight, range(1, 11))
  write_steps(resumed, range(1, 8))
  with resumed.open('a') as file:
    file.write('{"step": 8, "train/lo')  # Killed here.
  write_steps(resumed, range(6, 11), resume_step=5)
  assert resumed.read_bytes() == straight.read_bytes()


def test_a_complete_last_line_without_a_newline_is_kept(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\n{"step": 2}')
  writers.truncate(path, 2)
  assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_resuming_a_run_without_the_file_starts_it(tmp_path):
  write_steps(tmp_path / 'timeline.jsonl', [4], resume_step=3)
  assert [r['step'] for r in writers.records(tmp_path / 'timeline.jsonl')] == [
    4
  ]


def test_a_failed_truncation_leaves_the_file_as_it_was(tmp_path, monkeypatch):
  path = tmp_path / 'metrics.jsonl'
  write_steps(path, range(1, 5))
  before = path.read_bytes()

  def full_disk(_):
    raise OSError('No space left on device')

  monkeypatch.setattr(os, 'fsync', full_disk)
  with pytest.raises(OSError, match='No space'):
    writers.truncate(path, 2)
  assert path.read_bytes() == before


def test_a_broken_line_in_the_middle_is_named(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
  with pytest.raises(ValueError, match='line 2 is not a JSON object'):
    writers.truncate(path, 2)


def test_a_line_without_a_step_is_named(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"loss": 1.0}\n')
  with pytest.raises(ValueError, match='is not a whole number'):
    writers.truncate(path, 2)


def read_events(folder):
  """The (step, tag, value) of every scalar, by tensorboardX's own protobuf."""
  import struct

  from tensorboardX.proto import event_pb2

  found, purged = [], []
  for path in sorted(folder.iterdir()):
    data = path.read_bytes()
    while data:
      (size,) = struct.unpack('<Q', data[:8])
      event = event_pb2.Event.FromString(data[12 : 12 + size])
      data = data[16 + size :]
      if event.HasField('session_log'):
        purged.append(event.step)
      found += [
        (event.step, value.tag, value.simple_value)
        for value in event.summary.value
      ]
  return found, purged


def test_tensorboard_gets_every_metric_at_its_step(tmp_path):
  writer = writers.tensorboard(tmp_path)
  writer.write(7, {'train/loss': 0.5, 'rollout/accuracy': 0.25})
  writer.close()
  found, purged = read_events(tmp_path)
  assert found == [(7, 'train/loss', 0.5), (7, 'rollout/accuracy', 0.25)]
  assert purged == []


def test_resuming_hides_only_the_later_steps_from_tensorboard(tmp_path):
  writers.tensorboard(tmp_path, resume_step=7).close()
  _, purged = read_events(tmp_path)
  assert purged == [8]  # TensorBoard drops steps from this one on.


FULL = """
import resource, sys, threading
from rlinf_jax.run_files import writers

writer = writers.tensorboard(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
  writer.write(1, {f'metric_{i}': 0.5 for i in range(10)})
  writer.close()
except OSError as error:
  print(error.strerror, threading.active_count())
"""


def test_a_disk_that_is_full_is_an_error_of_the_write_alone(tmp_path):
  done = subprocess.run(
    [sys.executable, '-c', FULL, tmp_path],
    capture_output=True,
    text=True,
    check=True,
  )
  assert (done.stdout, done.stderr) == ('File too large 1\n', '')


def test_a_missing_wandb_package_is_explained(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'wandb', None)
  with pytest.raises(ImportError, match='pip install wandb'):
    writers.wandb('sums', tmp_path)


def test_wandb_continues_the_same_run_when_resumed(tmp_path, monkeypatch):
  calls = []

  def init(**settings):
    calls.append(settings)
    return types.SimpleNamespace(
      log=lambda values, step: calls.append((step, values)),
      finish=lambda: calls.append('finished'),
    )

  monkeypatch.setitem(sys.modules, 'wandb', types.SimpleNamespace(init=init))
  writer = writers.wandb('sums', tmp_path)
  writer.write(1, {'train/loss': 0.5})
  writer.close()
  writers.wandb('sums', tmp_path)
  first, logged, finished, second = calls
  assert first['project'] == 'sums'
  assert first['id'] == second['id']
  assert first['resume'] == second['resume'] == 'allow'
  assert logged == (1, {'train/loss': 0.5})
  assert finished == 'finished'
