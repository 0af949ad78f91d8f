"""The page on the run folder lists the fields that its files have."""

import json
import pathlib
import re
import types

import numpy as np
import pytest

from planner.costs import measured
from rlinf_jax import evaluate
from rlinf_jax.data import text_arrays
from rlinf_jax.planning import autoplan
from rlinf_jax.run import evaluation, run_log
from rlinf_jax.run_files import result
from rlinf_jax.runtime import timeline
from stages import base, metrics

PAGE = pathlib.Path(__file__).parents[2] / 'docs/run_folder.md'
ROW = re.compile(r'\| (?:`([\w.]+)`)? ?\| (`\w+`(?:, `\w+`)*) \|')


def documented():
  """The fields of each file, as the page has them."""
  text = PAGE.read_text().split('## Fields of the files')[1]
  fields, file = {}, None
  for line in text.split('## Metrics')[0].splitlines():
    if row := ROW.match(line):
      file = row[1] or file
      fields.setdefault(file, set()).update(re.findall(r'\w+', row[2]))
  return fields


def rows():
  """Rows of a completion whose environment failed."""
  ones = np.ones((1, 2), np.int32)
  names = ('prompt', 'prompt_mask', 'completion', 'completion_mask')
  scores = ('reward', 'correct', 'truncated', 'env_failed')
  return dict.fromkeys(names, ones) | {x: np.ones(1) for x in scores}


SOURCE = base.Source(
  None, None, None, text=lambda token, mask: ['x'] * len(token)
)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Every file with fields, as runs and evaluations write them."""
  folder = tmp_path_factory.mktemp('run')
  log = run_log.RunLog(folder, SOURCE, 1, 0, None)
  log.write_metrics(1, {})
  log.write_samples(1, 'eval', rows(), ['x'])
  log.write_timeline(
    1, [timeline.Span(1, 'all', 'run', 'learn', (1, 1), 0.0, 1.0, 1.0)]
  )
  stages = {'learn': measured.Estimate(1.0, 'modeled')}
  log.write_prediction(0, autoplan.Prediction(1.0, stages))
  log.notice(1, 'A process died.')
  log.close()
  result.Result(folder, 1, 1.0, {}).write()
  reference = text_arrays.Reference(*[text_arrays.pack(['x'])] * 2)
  held_out = evaluation.HeldOut([base.Problem(np.ones(1), reference)], None)
  info = {evaluation.SAMPLES: metrics.Rows(rows())}
  record = next(evaluation.completions(info, SOURCE, held_out, 0))
  (folder / 'completions.jsonl').write_text(json.dumps(record) + '\n')
  subject = {'step': None} | evaluate._subject(folder / 'none', None, 0)
  (folder / evaluate.EVALUATED).write_text(json.dumps(subject))
  parts = [types.SimpleNamespace(info={}, seconds=1.0)]
  evaluate._finish(folder, parts, held_out, subject)
  return folder


# The fields of metrics.jsonl are metrics: see metrics_test.py.
@pytest.mark.parametrize('name', sorted({*documented()} - {'metrics.jsonl'}))
def test_the_fields_of_a_file_are_those_that_are_written(name, folder):
  text = (folder / name).read_text()
  record = json.loads(text.splitlines()[0] if name.endswith('l') else text)
  assert documented()[name] == {*record}


def test_every_file_of_json_is_documented(folder):
  written = {x.name for x in folder.glob('*.json*')}
  assert written == {*documented()}
