"""The experiment that compares algorithms: its command lines and its table."""

import pathlib

import numpy as np
import pytest

from experiments.algorithms import __main__ as experiment
from experiments.algorithms import algorithms, informative, table
from rlinf_jax import gin_flags
from rlinf_jax.config import config
from rlinf_jax.run_files import run_folder

ROOT = pathlib.Path(__file__).parents[2]


def flag(line, name):
  return [x.partition('=')[2] for x in line if x.startswith(f'--{name}=')]


@pytest.mark.parametrize(
  'algorithm', (algorithms.WARM_START, *algorithms.ALL), ids=lambda x: x.name
)
def test_every_command_line_names_a_recipe_that_can_be_read(
  algorithm, monkeypatch
):
  monkeypatch.chdir(ROOT)
  macros = {'CHECKPOINT': '/start', 'SEED': 1, 'STEPS': 50}
  if algorithm.workflow == 'distillation':
    macros['TEACHER'] = '/teacher'
  line = experiment.command(algorithm, pathlib.Path('/run'), **macros)
  bindings = flag(list(map(gin_flags.as_binding, line)), 'gin_bindings')
  config.parse(flag(line, 'gin_file'), bindings, '/run')
  # The bindings of one algorithm have priority over those that all share.
  assert ('STEPS = 0' in bindings) == (algorithm is algorithms.WARM_START)


def test_every_family_has_a_control():
  shuffled = {x.workflow for x in algorithms.CONTROLS}
  rewarded = {x.workflow for x in algorithms.ALL} - {'distillation'}
  assert shuffled == rewarded


def test_the_table_says_when_the_goal_was_reached_first():
  accuracy = run_folder.Series(
    np.array([0, 20, 40, 50]), np.array([0.3, 0.86, 0.84, 0.9])
  )
  assert table.steps_to(accuracy, 0.85) == 20
  assert table.steps_to(accuracy, 0.95) is None


def test_the_table_leaves_out_a_run_that_was_stopped(tmp_path):
  folder = tmp_path / 'GRPO' / 'SEED=0'
  folder.mkdir(parents=True)
  (folder / 'result.json').write_text('{}')
  assert table.read(tmp_path)['GRPO'] == []


def test_groups_of_equal_rewards_are_not_informative():
  def series(**values):
    return {
      f'rollout/{name}': run_folder.Series(np.arange(2), np.array(value))
      for name, value in values.items()
    }

  grpo = series(groups_degenerate=[0.5, 0.25])
  dapo = series(groups_filled=[1.0, 0.5], rounds=[2.0, 3.0])
  assert informative.informative(grpo, 8) == 10
  assert informative.drawn(grpo, 8) == 16
  assert informative.informative(dapo, 8) == 12
  assert informative.drawn(dapo, 8) == 40


def test_a_run_of_dapo_that_learned_from_groups_of_equal_rewards_is_refused():
  step = np.array([1, 2, 3])

  def series(*shares):
    return {
      'rollout/groups_filled': run_folder.Series(step, np.ones(3)),
      'rollout/groups_degenerate': run_folder.Series(step, np.array(shares)),
    }

  informative.check('DAPO', series(0.0, 0.0, 0.0))
  with pytest.raises(SystemExit, match='DAPO learned in step 2 .* 12.5%'):
    informative.check('DAPO', series(0.0, 0.125, 0.0))
  older = series(0.0, 0.0, 0.0)
  del older['rollout/groups_degenerate']
  with pytest.raises(SystemExit, match='DAPO was run by a version'):
    informative.check('DAPO', older)
  grpo = {'rollout/groups_degenerate': run_folder.Series(step, np.ones(3))}
  informative.check('GRPO', grpo)
