"""A run as its user meets it: a process, a folder, a kill, a full disk."""

import json
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import claims
import core_only
import front_door
from rlinf_jax.prepare import warm_start
import saved
from stages.tasks import arithmetic

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[4]
RECIPE = 'gin_configs/grpo_arithmetic.gin'
SMALL = (
  'STEPS = 10',
  # A fresh model is never right: the entropy bonus still gives gradients.
  'workflows.grpo.entropy_coef = 0.05',
  'GROUP = 4',
  "train.train.plan = {'micro_batch': {'gradient': 8}}",
  'train.train.evaluate_every = 5',
  'train.train.checkpoint_every = 5',
  'arithmetic.problems.batch_size = 4',
  'arithmetic.problems.held_out = 8',
  'arithmetic.problems.held_out_batch = 8',
)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return warm_start.checkpoint(
    str(tmp_path_factory.mktemp('start')),
    corpus=arithmetic.corpus,
    vocabulary=64,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    feed_forward=64,
  )


def command(folder, model, *more, resume=False, recipe=RECIPE):
  bindings = [*SMALL, *more]
  if model:
    bindings.append(f'CHECKPOINT = "{model}"')
  return [
    sys.executable,
    '-m',
    'rlinf_jax.main',
    '--gin_file',
    recipe,
    *(f'--gin_bindings={binding}' for binding in bindings),
    '--workdir',
    str(folder),
    *(['--resume'] if resume else []),
  ]


def run(*args, kilobytes=None, **kwargs):
  """Runs to the end; limits files to `kilobytes`, to simulate a full disk."""
  limit = ['bash', '-c', f'ulimit -f {kilobytes}; exec "$0" "$@"']
  return subprocess.run(
    [*(limit if kilobytes else []), *command(*args, **kwargs)],
    cwd=ROOT,
    env=core_only.environment(),
    capture_output=True,
    text=True,
    timeout=600,
  )


def killed(folder, model, when, *more, how=signal.SIGKILL):
  """Starts a run and kills it once `when()` is true; returns its exit code."""
  process = subprocess.Popen(
    command(folder, model, *more),
    cwd=ROOT,
    env=core_only.environment(),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  deadline = time.time() + 900
  while not when():
    assert process.poll() is None, 'The run ended before it could be killed.'
    assert time.time() < deadline
    # Until the first step ends, looking often would only take time from it.
    started = (folder / 'metrics.jsonl').exists()
    time.sleep(0.002 if started else 0.1)
  process.send_signal(how)
  return process.wait()


def lines(folder):
  """Metrics of a run, without those that measure time."""
  text = (folder / 'metrics.jsonl').read_text().splitlines()
  return [
    {
      k: v
      for k, v in json.loads(line).items()
      if not k.startswith(('time/', 'throughput/', 'utilization/', 'wait/'))
    }
    for line in text
  ]


def state(folder, step):
  """Every array of a checkpoint, by path."""
  return saved.arrays(folder, step)


def equal_states(a, b):
  import jax

  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory, model):
  """Folder and result of a run of ten steps."""
  folder = tmp_path_factory.mktemp('uninterrupted') / 'run'
  done = run(folder, model)
  assert done.returncode == 0, done.stderr
  return folder, done


def test_a_run_writes_its_whole_folder(uninterrupted):
  folder, done = uninterrupted
  names = {path.name for path in folder.iterdir()}
  assert names >= {
    'config.gin',
    'operative_config.gin',
    'plan.json',
    'metrics.jsonl',
    'timeline.jsonl',
    'samples.jsonl',
    'events',
    'checkpoints',
    'model',
    'report.html',
    'result.json',
  }
  steps = [line['step'] for line in lines(folder)]
  assert steps == [0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10]
  assert re.search(r'step +7/10 .*length .*tok/s .*generate', done.stdout)
  assert '\x1b' not in done.stdout
  text = (folder / 'samples.jsonl').read_text()
  samples = [json.loads(line) for line in text.splitlines()]
  assert {x['split'] for x in samples} == {'train', 'eval'}
  for sample in samples:
    assert ('correct' in sample) == (sample['split'] == 'eval')
  assert sorted(p.name for p in (folder / 'checkpoints').iterdir()) == [
    '10',
    '5',
  ]


def test_transformers_loads_the_trained_model(uninterrupted, model):
  import transformers

  folder, _ = uninterrupted
  loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / 'model')
  trained = state(folder, 10)['actor.params.embed_VD']
  theirs = loaded.get_input_embeddings().weight.detach().numpy()
  np.testing.assert_array_equal(theirs, trained)
  before = transformers.AutoModelForCausalLM.from_pretrained(model)
  assert (
    before.get_input_embeddings().weight != loaded.get_input_embeddings().weight
  ).any()


@pytest.mark.parametrize(
  'how', claims.some([signal.SIGTERM, signal.SIGINT], keep=[signal.SIGTERM])
)
def test_an_interrupted_run_writes_a_checkpoint_and_resumes_from_it(
  uninterrupted, model, tmp_path, how
):
  folder = tmp_path / 'run'

  def after_two():
    metrics = folder / 'metrics.jsonl'
    return metrics.exists() and '"step": 2' in metrics.read_text()

  assert killed(folder, model, after_two, how=how) == 130
  done = here(folder, model, resume=True)
  assert done.returncode == 0, done.stderr
  start = int(re.search(r'10, resumed after (\d+)', done.stdout)[1])
  assert start >= 2
  assert lines(folder) == lines(uninterrupted[0])
  equal_states(state(folder, 10), state(uninterrupted[0], 10))


def test_a_run_killed_while_saving_resumes_from_the_last_complete_checkpoint(
  uninterrupted, model, tmp_path
):
  folder = tmp_path / 'run'
  often = 'train.train.checkpoint_every = 1'

  def writing():
    names = [p.name for p in (folder / 'checkpoints').glob('*')]
    complete = [int(name) for name in names if name.isdigit()]
    return (
      complete and max(complete) >= 3 and any('tmp' in name for name in names)
    )

  killed(folder, model, writing, often)
  done = here(folder, model, often, resume=True)
  assert done.returncode == 0, done.stderr
  start = int(re.search(r'10, resumed after (\d+)', done.stdout)[1])
  assert start >= 3
  assert lines(folder) == lines(uninterrupted[0])
  equal_states(state(folder, 10), state(uninterrupted[0], 10))


def here(*args, **kwargs):
  """Runs to the end in this process."""
  return front_door.run(*command(*args, **kwargs)[3:])


def test_a_finished_run_is_not_run_again(uninterrupted, model):
  folder, _ = uninterrupted
  before = (folder / 'metrics.jsonl').read_bytes()
  done = here(folder, model, resume=True)
  assert done.returncode == 0 and 'is finished: 10 steps' in done.stdout
  assert (folder / 'metrics.jsonl').read_bytes() == before


def refused(folder, model, *more, message):
  """Checks that a run fails with a message and leaves no new folder."""
  existed = folder.exists()
  done = here(folder, model, *more)
  assert done.returncode == 1, done.stdout + done.stderr
  assert re.search(message, done.stderr), done.stderr
  assert 'Traceback' not in done.stderr
  assert folder.exists() == existed


def test_an_occupied_folder_is_refused(uninterrupted, model):
  refused(uninterrupted[0], model, message='already holds a run: add --resume')


REFUSED = [
  ('CHECKPOINT = "nowhere"', 'no checkpoint at nowhere'),
  ('PROMPT = 5', r'has \d+ tokens and the limit is 5'),
  ('workflows.grpo.num_minibatches = 3', '16 rows cannot be split into 3'),
  ('GRUOP = 8', '`GRUOP` is set but nothing reads it.*`GROUP`'),
  ('workflows.grpo.clip_hihg = 0.3', 'clip_hihg.*clip_high'),
  (
    "train.train.plan = {'micro_batch': {'gradient': 5}}",
    'cannot be taken 5 at a time',
  ),
  ('arithmetic.problems.held_out = 9', '9 held-out problems'),
]


@pytest.mark.parametrize(
  'binding, message',
  claims.some(REFUSED, keep=[REFUSED[i] for i in (0, 3, 5)]),
)
def test_bad_input_is_refused_before_training(
  model, tmp_path, binding, message
):
  given = None if 'CHECKPOINT' in binding else model
  refused(tmp_path / 'run', given, binding, message=message)


def test_a_checkpoint_of_another_kind_of_model_is_refused(model, tmp_path):
  other = tmp_path / 'other'
  other.mkdir()
  (other / 'config.json').write_text('{"model_type": "mamba"}')
  refused(tmp_path / 'run', str(other), message="type 'mamba'; qwen2, qwen3")


def test_a_refused_recipe_leaves_no_warm_start_behind(tmp_path):
  wrong, message = 'STPES = 3', 'STPES.*STEPS'
  refused(tmp_path / 'run', None, wrong, message=message)


def test_a_full_disk_is_reported_and_the_last_checkpoint_stays(
  uninterrupted, model, tmp_path
):
  folder = saved.stopped_after(5, uninterrupted[0], tmp_path / 'run')
  done = run(folder, model, resume=True, kilobytes=20)
  assert done.returncode == 1, done.stdout
  # Threads of tensorstore may print tracebacks before it, but not after it.
  sentence = done.stderr.splitlines()[-1]
  assert 'A checkpoint could not be written' in sentence
  assert 'The checkpoint of step 5 is intact' in sentence
  again = here(folder, model, resume=True)
  assert again.returncode == 0 and '10, resumed after 5' in again.stdout
  # The steps after the checkpoint are taken again.
  assert lines(folder) == lines(uninterrupted[0])
  equal_states(state(folder, 10), state(uninterrupted[0], 10))
