import io
import json

from rlinf_jax.run import console

STEP = {
  'rollout/reward_mean': 0.43,
  'rollout/accuracy': 0.41,
  'rollout/response_length_mean': 23.1,
  'rollout/response_length_max': 31.0,
  'throughput/tokens_per_second': 4812.3,
  'train/policy_loss': 0.01,
  'time/step': 1.06,
  'time/apply': 0.03,
  'time/generate': 0.61,
  'time/gradient': 0.42,
}


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_a_step_is_one_line_with_the_biggest_stage_first():
  assert console.format_step(12, 200, STEP) == (
    'step  12/200  reward 0.43  accuracy 0.41  length 23.1/31  4,812 tok/s'
    '  generate 0.61s gradient 0.42s apply 0.03s'
  )


def test_stages_that_take_next_to_no_time_are_left_out():
  values = {'time/gradient': 0.5, 'time/keys': 0.004}
  assert console.format_step(3, 9, values) == 'step 3/9  gradient 0.50s'


def test_no_stage_is_named_with_no_seconds():
  values = {'time/gradient': 0.2, 'time/keys': 0.004, 'time/apply': 0.004}
  assert console.format_step(3, 9, values) == (
    'step 3/9  gradient 0.20s other 0.01s'
  )
  del values['time/apply']
  assert console.format_step(3, 9, values) == 'step 3/9  gradient 0.20s'


def test_a_line_fits_and_sums_the_stages_that_it_does_not_name():
  line = console.format_step(12, 200, STEP, width=100)
  assert len(line) <= 100
  assert line.endswith('4,812 tok/s  generate 0.61s other 0.45s')
  for width in range(12, 140):
    line = console.format_step(12, 200, STEP, width)
    assert len(line) <= width and line.startswith('step  12/200')
  assert console.format_step(12, 200, STEP, 12) == 'step  12/200'


def test_many_small_stages_are_summed_however_wide_the_line():
  values = {f'time/stage{i}': 0.01 for i in range(150)} | {'time/long': 1.0}
  assert console.format_step(3, 9, values) == 'step 3/9  long 1.00s other 1.50s'


def test_a_line_of_a_narrow_terminal_is_not_cut(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.setenv('COLUMNS', '90')
  stream = Terminal()
  view = console.create(200, start=10, stream=stream)
  view.write(12, STEP)
  view.close()
  assert '…' not in stream.getvalue() and '4,812' in stream.getvalue()


def test_missing_metrics_are_left_out():
  values = {'train/loss': 1.25, 'time/gradient': 0.5}
  assert (
    console.format_step(3, 9, values) == 'step 3/9  loss 1.250  gradient 0.50s'
  )
  assert console.format_step(3, 9, {}) == 'step 3/9'


def test_numbers_that_are_not_finite_are_shown():
  assert (
    console.format_step(3, 9, {'train/loss': float('nan')})
    == 'step 3/9  loss nan'
  )


def test_an_evaluation_is_marked_in_plain_text():
  stream = io.StringIO()
  view = console.create(200, stream=stream)
  view.write(20, {'eval/accuracy': 0.612, 'time/evaluate': 1.25})
  assert stream.getvalue() == (
    '--- evaluation  step  20/200  accuracy 61.2%  evaluate 1.25s ---\n'
  )


def test_a_file_gets_one_plain_line_per_step():
  stream = io.StringIO()
  view = console.create(3, stream=stream)
  for step in (1, 2, 3):
    view.write(step, STEP)
  view.close()
  text = stream.getvalue()
  assert text.count('\n') == 3
  assert text.isascii()
  assert text.replace('\n', '').isprintable()


def test_a_terminal_gets_the_lines_and_a_bar_that_is_removed(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.setenv('COLUMNS', '200')
  stream = Terminal()
  view = console.create(200, start=10, stream=stream)
  view.write(12, STEP)
  view.close()
  view.close()
  text = stream.getvalue()
  assert '12/200' in text
  assert '4,812' in text
  assert '\x1b[?25h' in text  # Shows the cursor again.
  view.print('Done.')
  assert stream.getvalue().endswith('Done.\n')


def test_markup_in_text_is_printed_unchanged(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  stream = Terminal()
  view = console.create(1, stream=stream)
  view.print('folder runs/[red]x')
  view.close()
  assert 'runs/[red]x' in stream.getvalue()


def test_facts_are_aligned():
  facts = {'folder': 'runs/x', 'on': '2 CPU devices'}
  assert console.format_facts('grpo, 200 steps', facts) == (
    'grpo, 200 steps\n  folder  runs/x\n  on      2 CPU devices'
  )


def test_the_summary_compares_the_first_evaluation_with_the_last(tmp_path):
  lines = [
    {'step': 0, 'eval/accuracy': 0.312},
    {'step': 1, 'train/policy_loss': 0.0},
    {'step': 20, 'eval/accuracy': 0.945},
  ]
  (tmp_path / 'metrics.jsonl').write_text(
    ''.join(json.dumps(line) + '\n' for line in lines)
  )
  text = console.format_summary(tmp_path, 372.0, 'runs/x/report.html')
  assert text.splitlines() == [
    'Finished 20 steps.',
    '  accuracy  31.2% -> 94.5% (held out)',
    '  time      6.2 minutes',
    f'  folder    {tmp_path}',
    '  report    runs/x/report.html',
  ]


def test_an_evaluation_has_the_scores_of_all_samples():
  values = {'eval/accuracy': 0.5, 'eval/pass_at_2': 0.6, 'eval/maj_at_2': 0.5}
  values |= {'eval/pass_at_8': 0.9, 'eval/maj_at_8': 0.7, 'eval/reward': 1.0}
  assert console.format_step(3, 9, values) == (
    'evaluation  step 3/9  accuracy 50.0%  pass@8 90.0%  maj@8 70.0%'
    '  reward 1.00'
  )


def test_the_summary_of_fine_tuning_has_the_held_out_loss(tmp_path):
  lines = [
    {'step': 0, 'eval/loss': 11.9, 'eval/agreement': 0.059},
    {'step': 20, 'eval/loss': 9.233, 'eval/agreement': 0.11},
  ]
  (tmp_path / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  text = console.format_summary(tmp_path, 6.0, 'none')
  assert '  loss       11.900 -> 9.233 (held out)\n' in text
  assert '  agreement  5.9% -> 11.0% (held out)\n' in text


def test_the_summary_counts_one_step(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\n')
  text = console.format_summary(tmp_path, 1.0, 'report.html')
  assert text.startswith('Finished 1 step.')


def test_the_summary_of_a_run_without_metrics_leaves_them_out(tmp_path):
  text = console.format_summary(tmp_path, 6.0, 'none')
  assert 'accuracy' not in text
  assert '0.1 minutes' in text


def test_the_summary_has_the_first_and_last_score_of_each_task(tmp_path):
  lines = [
    {'step': 0, 'eval/success_once': 0.3, 'eval/lift_it/success_once': 0.2},
    {'step': 9, 'eval/success_once': 0.5, 'eval/lift_it/success_once': 1.0},
  ]
  (tmp_path / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  text = console.format_summary(tmp_path, 6.0, 'none')
  assert text.splitlines()[-2:] == [
    'By set or task (held out):',
    '   20.0% -> 100.0%  lift_it',
  ]
