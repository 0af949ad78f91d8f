"""A run of PPO by the arguments of the command line: a stop, a report."""

import json

import pytest

import front_door
import saved
from tests.rlinf_jax.run.end_to_end.language_run_test import (
  equal_states,
  lines,
  state,
)

pytestmark = pytest.mark.slow

SMALL = (
  'workflows.embodied_ppo.num_envs = 16',
  'workflows.embodied_ppo.num_steps = 30',
  'seed_source.seeds.held_out = 8',
  'seed_source.seeds.held_out_batch = 4',
  'optimizers.adamw.decay_steps = None',
  'train.train.evaluate_every = 2',
  'train.train.checkpoint_every = 2',
)


def run(folder, *more, resume=False, how=front_door.run):
  done = how(
    '--gin_file=gin_configs/ppo_push.gin',
    f'--workdir={folder}',
    *(f'--gin_bindings={binding}' for binding in (*SMALL, *more)),
    *(['--resume'] if resume else []),
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  """Folder and output of a run of four steps."""
  folder = tmp_path_factory.mktemp('uninterrupted') / 'run'
  return folder, run(folder, 'STEPS = 4')


def test_a_run_prints_success_and_writes_a_report(uninterrupted):
  folder, output = uninterrupted
  assert 'evaluation  step 0/4  success 0.0%  success at end 0.0%' in output
  assert 'env steps/s' in output
  assert '-> ' in output.split('Finished 4 steps.')[1].splitlines()[1]
  # Evaluations are after steps 0, 2 and 4; the first and last have videos.
  videos = sorted(path.name for path in (folder / 'videos').iterdir())
  assert videos == ['step_000000.gif', 'step_000004.gif']
  page = (folder / 'report.html').read_text()
  assert page.count('data:image/gif') == 2
  for title in ('Held-out success', 'Explained variance', 'Episode length'):
    assert title in page
  assert (folder / 'model' / 'policy.safetensors').exists()
  numbers = json.loads((folder / 'result.json').read_text())['metrics']
  assert 0 <= numbers['eval/success_at_end'] <= numbers['eval/success_once']
  assert numbers['env/steps'] == 16 * 30


def test_a_resumed_run_has_the_same_bits(uninterrupted, tmp_path):
  """Running episodes continue from the checkpoint."""
  folder, _ = uninterrupted
  saved.stopped_after(2, folder, tmp_path / 'run')
  run(tmp_path / 'run', 'STEPS = 4', resume=True)
  equal_states(state(tmp_path / 'run', 4), state(folder, 4))
  assert lines(tmp_path / 'run') == lines(folder)


@pytest.mark.claims
def test_a_plan_that_is_searched_for_does_not_change_the_results(
  uninterrupted, tmp_path
):
  """In `make test`, runs of language models and of simulators search."""
  folder, _ = uninterrupted
  # With one device. The plans of eight take a minute to search.
  output = run(
    tmp_path / 'run',
    'STEPS = 4',
    "train.train.plan = 'auto'",
    how=front_door.run_process,
  )
  assert 'a step, ' in output and 'Plan: ' in output
  for want, got in zip(*map(lines, (folder, tmp_path / 'run')), strict=True):
    if want['step'] <= 1:  # Rounding grows from step to step.
      assert got == pytest.approx(want, rel=1e-3, abs=1e-5)


def test_a_run_ends_early_at_its_target_score(tmp_path):
  output = run(tmp_path / 'run', 'STEPS = 4', 'train.train.stop_at_score = 0.0')
  assert 'Finished 0 steps.' in output


def test_a_run_without_finite_gradients_ends_and_goes_on_when_they_are(
  tmp_path,
):
  folder = tmp_path / 'run'
  more = (
    'STEPS = 4',
    'train.train.max_skipped_steps = 3',
    'train.train.evaluate_every = 0',
  )
  with pytest.raises(AssertionError) as ended:
    # The square of such a gradient is infinite in float32.
    run(folder, *more, 'workflows.embodied_ppo.value_coef = 1e38')
  message = str(ended.value)
  assert 'No gradient was finite from step 1 to step 3' in message
  assert 'Traceback' not in message
  assert not (folder / 'result.json').exists()
  output = run(folder, *more, resume=True)
  assert 'step 4/4' in output
  assert 'In 3 steps an update was skipped' in output
  assert (
    'In 3 steps an update was skipped' in (folder / 'report.html').read_text()
  )
