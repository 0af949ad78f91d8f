"""A grid is every combination of values, each with a folder of its own."""

import pytest

from rlinf_jax.sweep import grid

HIGH = 'workflows.grpo.clip_high = [0.2, 0.28]'


@pytest.mark.parametrize(
  ('text', 'name', 'values'),
  [
    (HIGH, 'workflows.grpo.clip_high', [0.2, 0.28]),
    ('a.seed=range(1, 6, 2)', 'a.seed', [1, 3, 5]),
    ('a.b = (1, None, "x = y", [1])', 'a.b', [1, None, 'x = y', [1]]),
    ('warmup/train.train.steps = [-5]', 'warmup/train.train.steps', [-5]),
    ('STEPS = [1]', 'STEPS', [1]),
  ],
)
def test_over_is_a_name_and_python_values(text, name, values):
  assert grid.parse_over(text) == (name, values)


@pytest.mark.parametrize(
  'right',
  [
    '',
    '0.2',
    '[]',
    '[0.2, 0.28',
    '{0.2, 0.28}',
    'range(0)',
    'range("a")',
    'range(2, step=1)',
    'range(10**12)',
    'range(1000000000000)',
    'range(1' + 30 * '0' + ')',
    'list(range(3))',
    '[x for x in range(3)]',
    '__import__("os").getcwd()',
    '[__import__("os").getcwd()]',
    '[%MACRO]',
  ],
)
def test_other_values_are_refused(right):
  with pytest.raises(ValueError, match=r'should be a Python list such as'):
    grid.parse_over(f'a.b = {right}')


@pytest.mark.parametrize('text', ['', 'a.b', '[1, 2]', '= [1]', 'a b = [1]'])
def test_an_over_without_a_name_is_refused(text):
  with pytest.raises(ValueError, match='is not a parameter and its values'):
    grid.parse_over(text)


def names(*over):
  return [point.name for point in grid.grid(over, 'runs')]


def test_points_are_all_combinations_with_short_names():
  assert names(HIGH, 'train.train.seed = range(2)') == [
    'clip_high=0.2,seed=0',
    'clip_high=0.2,seed=1',
    'clip_high=0.28,seed=0',
    'clip_high=0.28,seed=1',
  ]


def test_parameters_with_the_same_last_name_get_longer_labels():
  assert names(
    'adam.rate = [1]',
    'warmup/adam.rate = [2]',
    'critic.adam.rate = [3]',
    'a.seed = [4]',
  ) == ['adam.rate=1,warmup.adam.rate=2,critic.adam.rate=3,seed=4']
  assert names('a.actor.adam.rate = [1]', 'a.critic.adam.rate = [2]') == [
    'actor.adam.rate=1,critic.adam.rate=2'
  ]


def test_names_of_points_are_single_folders():
  assert names('a.path = ["data/x y", [0.9, 0.95], {"k": 1}, None]') == [
    'path=data_x_y',
    'path=[0.9,0.95]',
    'path=__k__1_',
    'path=None',
  ]


@pytest.mark.parametrize(
  'over',
  [
    ['a.b = [1, 1]'],
    ['a.b = [1]', 'a.b = [2]'],
    ['a.b = ["x/y", "x_y"]'],
  ],
)
def test_duplicate_points_are_refused(over):
  with pytest.raises(ValueError, match='Two points of the grid'):
    names(*over)


def test_a_grid_of_too_many_points_is_refused_before_it_is_built():
  axes = [f'a.{name} = range(100)' for name in 'bcdefgh']
  with pytest.raises(ValueError, match=r'has 100,000,000,000,000 points'):
    grid.grid(axes, 'runs')
  assert len(grid.grid(axes[:2], 'runs')) == 10_000


def test_texts_that_folders_cannot_tell_apart_are_refused_with_the_reason():
  with pytest.raises(ValueError, match='let texts differ in letters or digits'):
    grid.grid(["MODEL = ['a/b', 'a b']"], 'runs')
