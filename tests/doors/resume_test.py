"""A run goes on with what may change, and refuses to become another one."""

import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlinf_jax.config import config, config_changes
from rlinf_jax.run_files import checkpoint
import saved

ROOT = pathlib.Path(__file__).parents[2]
SUMS = 'gin_configs/grpo_arithmetic.gin'


@pytest.fixture
def begun(tmp_path, monkeypatch):
  """The folder of a run with a checkpoint."""
  monkeypatch.chdir(ROOT)
  folder = tmp_path / 'run'
  (folder / 'checkpoints/3').mkdir(parents=True)
  config.parse([SUMS], [], str(folder))
  config.save(folder / 'config.gin')
  return folder


def go_on(folder, *bindings):
  config.parse([SUMS], bindings, str(folder))
  return [str(x) for x in config_changes.since_start(folder)]


FINE = {
  'STEPS = 7': '`STEPS` was 130 and is 7 now',
  'optimizers.adamw.learning_rate = 1e-9': '`optimizers.adamw.learning_rate` '
  'was ',
  'train.train.evaluate_every = 3': '`train.train.evaluate_every` was ',
  'train.train.plan = "plan.json"': '`train.train.plan` was ',
  'workflows.grpo.clip_high = 0.5': '`workflows.grpo.clip_high` was ',
  'train.train.max_skipped_steps = 3': '`train.train.max_skipped_steps` was '
  'not set and is 3 now',
}


@pytest.mark.parametrize('binding', FINE)
def test_a_change_with_which_a_run_goes_on_is_shown(binding, begun):
  (change,) = go_on(begun, binding)
  assert change.startswith(FINE[binding])


OTHER = {
  'SEED = 9': '`SEED` was 0 and is 9 now',
  'warm_start.checkpoint.width = 8': '`warm_start.checkpoint.width` was ',
  'warm_start.checkpoint.layers = 9': '`warm_start.checkpoint.layers` was ',
  'train.train.workflow = None': '`train.train.workflow` was @',
  'workflows.grpo.optimizer = @optimizers.adam()': '`workflows.grpo.optimizer`',
}


@pytest.mark.parametrize('binding', OTHER)
def test_a_change_that_makes_another_run_is_refused(binding, begun):
  # The parameter need not take the value for the recipe to be compared.
  name, _, value = binding.partition(' = ')
  text = config.text()
  now = [x for x in text.splitlines() if not x.startswith(f'{name} =')]
  changes = config_changes.compare(text, '\n'.join([*now, binding]))
  fixed = [str(x) for x in changes if x.is_fixed]
  assert len(fixed) == 1 and OTHER[binding].split(' was')[0] in fixed[0]


def test_all_such_changes_are_named_at_once(begun):
  with pytest.raises(ValueError) as error:
    go_on(begun, 'SEED = 9', 'warm_start.checkpoint.width = 8', 'STEPS = 7')
  text = str(error.value)
  assert text.startswith(f'{begun} was begun with other settings: `SEED` was 0')
  assert '`warm_start.checkpoint.width` was ' in text and 'STEPS' not in text
  assert text.endswith('give them as before, or choose another --workdir.')


def test_the_same_recipe_goes_on_in_another_folder(begun, tmp_path):
  assert go_on(begun) == []
  moved = begun.rename(tmp_path / 'moved')
  assert go_on(moved) == []


def test_a_run_without_a_checkpoint_begins_anew(begun):
  (begun / 'checkpoints/3').rmdir()
  assert go_on(begun, 'SEED = 9') == []


def test_a_model_that_a_run_has_made_is_not_made_again(begun):
  """Its width would not be that of the recipe."""
  (begun / 'checkpoints/3').rmdir()
  (begun / 'warm_start/model').mkdir(parents=True)
  with pytest.raises(ValueError) as error:
    go_on(begun, 'warm_start.checkpoint.width = 8')
  text = str(error.value)
  assert text.startswith(f'{begun} has no checkpoint yet, but what its run')
  assert 'settings: `warm_start.checkpoint.width` was ' in text
  assert f'Delete {begun}/warm_start to make it again, or copy it' in text
  assert go_on(begun, 'STEPS = 7') == ['`STEPS` was 130 and is 7 now']


class State(NamedTuple):
  params: Any
  moments: Any


def state(width=3, dtype=jnp.float32, **more):
  params = {'up_DF': jnp.zeros((2, width), dtype)} | more
  return State(params, (None, (jnp.zeros(4), ())))


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """The folder of a checkpoint."""
  folder = tmp_path_factory.mktemp('written')
  saver = checkpoint.Checkpoints(folder, 1)
  saver.save(3, saved.Tree(state()), {'n': np.zeros(2)}, {3: {}})
  saver.close()
  return folder


@pytest.mark.parametrize(
  ('now', 'words'),
  [
    (
      state(width=5),
      'params.up_DF is float32[2, 3] there and float32[2, 5] now',
    ),
    (
      state(dtype=jnp.bfloat16),
      'params.up_DF is float32[2, 3] there and bfloat16[2, 3] now',
    ),
    (
      state(down_FD=jnp.zeros(1)),
      'params.down_FD is missing there and float32[1] now',
    ),
    (
      State(state().params, ()),
      'moments.1.0 is float32[4] there and missing now',
    ),
  ],
)
def test_a_checkpoint_of_other_shapes_is_refused_in_our_words(
  now, words, written
):
  with pytest.raises(ValueError) as error:
    saved.load(checkpoint.Checkpoints(written, 1), now, {'n': np.zeros(2)})
  assert str(error.value) == (
    f'The checkpoint of step 3 in {written} does not fit the recipe: {words}. '
    'Give the sizes and the optimizer that the run was begun with, as in its '
    'config.gin, or choose another --workdir.'
  )


def test_a_checkpoint_of_the_same_shapes_is_read(written):
  reader = checkpoint.Checkpoints(written, 1)
  contents, found = saved.load(reader, state(), {'n': np.zeros(2)})
  assert contents.step == 3
  assert jax.tree.structure(found) == jax.tree.structure(state())
