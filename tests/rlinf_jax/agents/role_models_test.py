"""Models of several roles are written beside each other."""

import json

import chex
import jax
import numpy as np
import pytest

from rlinf_jax import evaluate, train
from rlinf_jax.agents import role_models
from rlinf_jax.config import config
from rlinf_jax.prepare import warm_start


def test_each_role_has_a_folder(tmp_path):
  written = {}

  def write(path, params):
    assert path.parent.is_dir()
    written[path] = params

  role_models.export(tmp_path / 'model', {'one': 1, 'two': 2}, write=write)
  assert written == {tmp_path / 'model/one': 1, tmp_path / 'model/two': 2}


RECIPE = 'gin_configs/grpo_two_policies.gin'
SMALL = (
  'problems.problems.held_out = 16',
  'problems.problems.held_out_batch = 16',
  'warm_start.checkpoint.width = 32',
  'warm_start.checkpoint.layers = 1',
)


@pytest.fixture(scope='module')
def models(tmp_path_factory):
  """A folder of a solver and a critic with other weights, as a run has it."""
  folder = tmp_path_factory.mktemp('two')
  for seed, name in enumerate(('solver', 'critic')):
    workdir = folder / str(seed)
    config.parse([RECIPE], [*SMALL, f'SEED = {seed}'], str(workdir))
    config.call(warm_start.checkpoint, workdir=str(workdir))
    (folder / 'model').mkdir(exist_ok=True)
    (workdir / 'warm_start/model').rename(folder / 'model' / name)
  return folder / 'model'


def read(given, folder):
  """Reads the recipe that begins with a folder of models."""
  bindings = [*SMALL, f'CHECKPOINT = "{given}"']
  config.parse([RECIPE], bindings, str(folder))


def start(given, folder):
  """The parameters of the solver and of the critic in that recipe."""
  read(given, folder)
  state = config.call(
    lambda workflow: workflow.init(jax.random.key(0)), bindings_of=train.train
  )
  return [learner.actor.params for learner in state.learners]


def test_each_role_begins_with_the_model_of_its_name(models, tmp_path):
  both = start(models, tmp_path)
  (solver, _), (critic, same) = (
    start(models / name, tmp_path) for name in ('solver', 'critic')
  )
  chex.assert_trees_all_equal(both, [solver, critic])
  chex.assert_trees_all_equal(critic, same)
  leaves = zip(*map(jax.tree.leaves, (solver, critic)), strict=True)
  assert any(not np.array_equal(x, y) for x, y in leaves)


@pytest.mark.slow
def test_an_evaluation_takes_a_model_for_each_role(models, tmp_path):
  """The solver's words are those of its own model, not of the critic's."""
  completions = []
  for given in (models, models / 'critic'):
    folder = tmp_path / given.name
    read(given, folder)
    config.call(evaluate.evaluate, bindings_of=train.train, workdir=str(folder))
    lines = (folder / 'completions.jsonl').read_text().splitlines()
    completions.append([json.loads(line)['completion'] for line in lines])
  both, critic = completions
  assert len(both) == len(critic) == 16 and both != critic


def test_a_folder_without_a_model_of_the_role_is_refused(models, tmp_path):
  with pytest.raises(FileNotFoundError, match='neither a model'):
    role_models.checkpoint(models, 'planner')
  with pytest.raises(FileNotFoundError, match='of one model for all roles'):
    read(tmp_path, tmp_path)
    config.call(train.train, workdir=str(tmp_path / 'run'))
