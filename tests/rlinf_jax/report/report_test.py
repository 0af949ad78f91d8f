from html import parser
import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import gin
import pytest

import fake_run
from rlinf_jax.config import config
from rlinf_jax.report import report
from rlinf_jax.report.html import charts, samples_html
from rlinf_jax.run_files import writers

VOID = {'meta', 'link', 'br'}


class Page(parser.HTMLParser):
  """Parses a page: the links it loads, and whether its tags are balanced."""

  def __init__(self, text):
    super().__init__()
    self.fetched, self.open, self.seen = [], [], []
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.seen.append(tag)
    if tag not in VOID:
      self.open.append(tag)
    for name, value in attrs:
      if name in ('src', 'href', 'xlink:href', 'data', 'action', 'srcset'):
        self.fetched.append(value)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_startendtag(self, tag, attrs):
    self.handle_starttag(tag, attrs)
    if tag not in VOID:
      self.open.pop()


@pytest.fixture(scope='module')
def full(tmp_path_factory):
  """The report of a finished run, as text."""
  folder = fake_run.make_run(tmp_path_factory.mktemp('runs') / 'sums')
  return report.write(folder).read_text(encoding='utf-8')


def drawn(page):
  return re.findall(r'<svg.*?</svg>', page, re.DOTALL)


def test_the_page_is_self_contained(full):
  page = Page(full)
  assert page.open == []
  outside = [link for link in page.fetched if not link.startswith('#')]
  assert outside == ['data:,']  # The icon: or browsers would ask for one.
  assert not {'script', 'img', 'iframe', 'object'} & set(page.seen)
  assert set(re.findall(r'url\((.)', full)) == {'#'}
  assert '@import' not in full
  assert '://' not in full


def test_the_page_summarizes_the_run(full):
  for text in (
    'rose from 31.0\u202f% to 94.1\u202f% in 180 steps and 5.3 minutes.',
    'Most time was spent in generate (57\u202f%).',
    'warmed up in 300 steps and 75 seconds.',
    '<b>31.0\u202f%</b><i>→</i><b>94.1\u202f%</b>',
    'state finished',
    '<span>grpo</span>',
  ):
    assert text in full


def test_the_page_has_every_part(full):
  titles = re.findall(r'<h[123]>(.*?)(?: ?<small|</h)', full)
  for title in (
    'Warm-up: held-out accuracy',
    'Held-out accuracy',
    'Reward',
    'Policy loss',
    'Entropy',
    'KL divergence',
    'Clip fraction',
    'Response length',
    'Gradient norm',
    'Throughput',
    'Time by stage',
    'Seconds per step',
    'The last 4 steps',
    'After step 0',
    'After step 100',
    'After step 180',
  ):
    assert title in titles
  assert titles.index('Held-out accuracy') < titles.index('Reward')
  assert 'STEPS = 180' in full


def test_samples_are_colored_by_whether_they_are_correct(full):
  first, _, last = re.findall(r'<section.*?</section>', full, re.DOTALL)
  assert first.count('sample right') == 3
  assert first.count('sample wrong') == 5
  assert last.count('sample wrong') == 0
  assert '9 of 10 correct' in last


def test_an_evaluation_of_several_samples_is_not_called_greedy(full, tmp_path):
  assert 'held out, greedy' in full and 'Several samples' not in full
  lines = [
    {'step': n, 'eval/accuracy': 0.1, 'eval/pass_at_4': 0.2} for n in (0, 3)
  ]
  lines.append({'step': 3, 'rollout/accuracy': 0.1})
  fake_run.write_lines(tmp_path / 'metrics.jsonl', lines)
  page = report.write(tmp_path).read_text(encoding='utf-8')
  assert 'held out, sampled' in page and 'held out, greedy' not in page
  assert 'Several samples' in page and 'pass@4' in page


@pytest.mark.parametrize(
  ('scores', 'title', 'marks'),
  [
    # A reward for the form of a wrong answer.
    ({'correct': 0.0, 'reward': 0.5}, '0 of 3 correct', '✗ 0.5'),
    ({'correct': 1.0, 'reward': 0.1}, '3 of 3 correct', '✓ 0.1'),
    ({'reward': 0.5}, 'mean reward 0.5', '"reward">0.5'),
  ],
)
def test_a_reward_does_not_tell_what_is_correct(tmp_path, scores, title, marks):
  folder = fake_run.make_run(tmp_path / 'run', steps=3, every=1)
  sample = {'step': 0, 'split': 'eval', 'prompt': '2+2=', 'completion': '5'}
  fake_run.write_lines(folder / 'samples.jsonl', [sample | scores] * 3)
  page = report.write(folder).read_text(encoding='utf-8')
  assert title in page and page.count(marks) == 3
  assert page.count('✓') + page.count('✗') == 3 * ('correct' in scores)
  bad = [sample | scores | {'correct': 'yes'}]
  fake_run.write_lines(folder / 'samples.jsonl', bad)
  with pytest.raises(ValueError, match="'correct' = 'yes', which no run write"):
    report.write(folder)


@pytest.mark.parametrize('split', ['eval', 'train'])
def test_samples_say_the_right_answer(tmp_path, split):
  folder = fake_run.make_run(tmp_path / 'run', steps=3, every=1)
  sample = {'step': 0, 'split': split, 'prompt': 'Is 2 < 3?', 'reward': 0.0}
  sample |= {'completion': 'no'} | ({'correct': 0.0} if split == 'eval' else {})
  with_answer = sample | {'answer': '2 < 3 holds'}
  fake_run.write_lines(folder / 'samples.jsonl', [sample, with_answer])
  page = report.write(folder).read_text(encoding='utf-8')
  assert page.count('The answer is') == 1
  assert 'The answer is 2 &lt; 3 holds' in page


def test_predictions_of_stages_of_next_to_no_time_are_left_out(tmp_path):
  folder = fake_run.make_run(tmp_path / 'run', steps=3, every=1)
  stages = {'generate': [0.9, 'measured'], 'sometimes': [0.02, 'modeled']}
  line = {'step': 0, 'seconds': 1.0, 'stages': stages}
  line['stages']['never'] = [0.0001, 'modeled']
  fake_run.write_lines(folder / 'predictions.jsonl', [line])
  page = report.write(folder).read_text(encoding='utf-8')
  table = page.partition('Predicted and measured time')[2]
  assert '<td>generate</td>' in table and '<td>sometimes</td>' in table
  assert '<td>never</td>' not in table


def test_text_from_the_run_is_escaped(full, tmp_path):
  assert '# &lt;not&gt; markup &amp; not $money' in full
  assert '&lt;eos&gt;' in full
  folder = fake_run.make_run(tmp_path / '<b>run', steps=3, every=1)
  sample = {'step': 9, 'split': 'eval', 'prompt': '<script>', 'reward': 0.0}
  with (folder / 'samples.jsonl').open('a') as file:
    file.write(json.dumps({**sample, 'completion': '</pre>' * 500}) + '\n')
  stages = {'generate': [0.5, '<script>x']}
  with (folder / 'predictions.jsonl').open('a') as file:
    line = {'step': 0, 'seconds': 1.0, 'stages': stages}
    file.write(json.dumps(line) + '\n')
  page = report.write(folder).read_text(encoding='utf-8')
  assert Page(page).open == []
  assert '&lt;script&gt;' in page and '<td>&lt;script&gt;x</td>' in page
  assert '&lt;b&gt;run' in page
  assert page.count('&lt;/pre&gt;') == samples_html.LONGEST // len('</pre>')


def test_pictures_take_all_their_colors_from_the_page(full):
  pictures = drawn(full)
  assert len(pictures) == 14
  for picture in pictures:
    assert not re.findall(r'#[0-9a-f]{6}', picture)
    ElementTree.fromstring(picture.replace('xlink:', ''))
  used = set(re.findall(r'var\((--\w+)\)', full)) - {'--c'}
  light, dark = re.findall(r':root \{(.*?)\}', full, re.DOTALL)
  assert used <= set(re.findall(r'(--\w+):', light))
  assert re.findall(r'(--\w+):', light) == re.findall(r'(--\w+):', dark)


def test_a_long_run_still_makes_a_small_page(tmp_path):
  folder = fake_run.make_run(tmp_path / 'long', steps=4000, every=100)
  (folder / 'config.gin').write_text('a' * 1_000_000)
  assert report.write(folder).stat().st_size < 1_000_000


def test_an_unfinished_run_is_marked(tmp_path):
  folder = fake_run.make_run(tmp_path / 'r', steps=57, finished=False)
  with (folder / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 58, "train/po')
  (folder / 'result.json').write_text('{"steps"')
  page = report.write(folder).read_text(encoding='utf-8')
  assert 'state unfinished' in page
  assert 'it is still running, or it stopped after step 57.' in page


@pytest.mark.parametrize('lines', range(1, 6))
def test_a_run_can_be_read_from_its_first_line_on(tmp_path, lines):
  folder = fake_run.make_run(
    tmp_path / 'r', steps=3, every=1, finished=False, warm_start=False
  )
  path = folder / 'metrics.jsonl'
  path.write_text(''.join(path.read_text().splitlines(True)[:lines]))
  for name in ('timeline.jsonl', 'samples.jsonl', 'config.gin', 'plan.json'):
    (folder / name).unlink()
  page = report.write(folder).read_text(encoding='utf-8')
  assert Page(page).open == []
  assert drawn(page)


@pytest.mark.filterwarnings('error')
def test_a_run_without_finite_values_is_shown(tmp_path):
  folder = fake_run.make_run(tmp_path / 'r', steps=30, warm_start=False)
  path = folder / 'metrics.jsonl'
  lines = list(writers.records(path))
  for line in lines:
    line.update({name: 'NaN' for name in line if name != 'step'})
  fake_run.write_lines(path, lines)
  page = report.write(folder).read_text(encoding='utf-8')
  assert 'From step 0 on, some values were NaN or infinite' in page
  assert 'The run took 30 steps' in page


def test_the_seconds_of_a_step_are_not_those_of_stages_that_overlap(tmp_path):
  step = {'time/step': 1.0, 'time/generate': 0.9, 'time/gradient': 0.8}
  lines = [{'step': i, 'train/loss': 1.0, **step} for i in (1, 2, 3)]
  fake_run.write_lines(tmp_path / 'metrics.jsonl', lines)
  page = report.write(tmp_path).read_text(encoding='utf-8')
  assert '<h3>Seconds per step</h3><span class="value">1.00 s</span>' in page
  assert '90.0\u202f%' in page
  assert 'stages of different places overlap' in page


def test_every_place_has_its_own_rows(tmp_path):
  folder = fake_run.make_run(tmp_path / 'r', steps=2, warm_start=False)
  record = {
    'step': 2,
    'what': 'run',
    'stage': 'generate',
    'start': 0.0,
    'end': 1.0,
  }
  fake_run.write_lines(
    folder / 'timeline.jsonl',
    [{**record, 'place': 'sampler'}, {**record, 'place': 'learner'}],
  )
  page = report.write(folder).read_text(encoding='utf-8')
  assert '>learner · generate</text>' in page
  assert '>sampler · generate</text>' in page


def test_the_headline_of_a_supervised_run_is_its_loss(tmp_path):
  folder = fake_run.make_warm_up(tmp_path / 'sft', evaluated=False)
  page = report.write(folder).read_text(encoding='utf-8')
  assert 'Loss fell from' in page
  assert page.count('<h3>Loss</h3>') == 1


@pytest.mark.parametrize(
  ('scope', 'name'), [(None, 'grpo'), ('imitate', 'sft')]
)
def test_the_workflow_of_a_warm_up_is_its_own(scope, name, tmp_path):
  """Its config.gin holds the bindings of the run that it is for, too."""
  folder = fake_run.make_warm_up(tmp_path / 'warm_start')
  recipe = tmp_path / 'recipe.gin'
  recipe.write_text(
    'from __gin__ import dynamic_registration\n'
    'from rlinf_jax import train\n'
    'from stages import workflows\n'
    'train.train.workflow = @workflows.grpo()\n'
    'imitate/train.train.workflow = @workflows.sft()\n'
  )
  config.parse([str(recipe)], [], str(folder))
  with gin.config_scope(scope):
    config.save(folder / 'config.gin')
  page = report.write(folder).read_text(encoding='utf-8')
  assert f'<span>{name}</span>' in page


def test_a_folder_without_metrics_is_refused(tmp_path):
  done = subprocess.run(
    [sys.executable, '-m', 'rlinf_jax.report', str(tmp_path)],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 1
  assert done.stderr == (
    f'{tmp_path} has no metrics to report: its metrics.jsonl is missing or '
    'empty. Give the --workdir of a run that finished at least one step.\n'
  )
  assert not list(tmp_path.iterdir())


def test_a_report_that_fails_does_not_fail_the_training(tmp_path, monkeypatch):
  folder = fake_run.make_run(tmp_path / 'r', steps=3)

  def broken(*_, **__):
    raise RuntimeError('no such font.')

  monkeypatch.setattr(charts, 'curves', broken)
  assert report.try_write(folder) == (
    f'none: no such font. Try again: python -m rlinf_jax.report {folder}'
  )
  assert not (folder / 'report.html').exists()


def test_the_page_has_a_table_of_scores_by_task(full, tmp_path):
  fake_run.write_lines(
    tmp_path / 'metrics.jsonl',
    [
      {'step': 0, 'eval/success_once': 0.3, 'eval/lift/success_once': 0.25},
      {'step': 5, 'eval/success_once': 0.5, 'eval/lift/success_once': 0.75},
    ],
  )
  page = report.write(tmp_path).read_text(encoding='utf-8')
  percent = lambda x: f'<td>{x}\u202f%</td>'
  row = f'<tr><td>lift</td>{percent("25.0")}{percent("75.0")}</tr>'
  assert row in page
  assert 'By set or task' in page and 'By set or task' not in full
