"""A value that no run would take is refused before any point runs."""

import pytest

from rlinf_jax.sweep import check, grid

RECIPE = ['gin_configs/grpo_arithmetic.gin']


@pytest.mark.parametrize(
  ('over', 'message'),
  [
    ("STEPS = [1, 'ten']", "--gin_bindings 'STEPS = 'ten'': `STEPS = 'ten'`, "),
    (
      'workflows.grpo.clip_hih = [0.2]',
      'no parameter `clip_hih`; did you mean',
    ),
    ('STPES = [1]', '`STPES` is set but nothing reads it; did you mean `STEPS'),
    (
      'workflows.dapo.clip_high = [0.2]',
      '`workflows.dapo.clip_high` is set but nothing reads it',
    ),
  ],
)
def test_a_wrong_value_of_any_parameter_is_refused(over, message, tmp_path):
  points = grid.grid(['GROUP = [2, 4]', over], tmp_path / 'sweep')
  with pytest.raises(ValueError) as caught:
    check.check(RECIPE, [], points)
  assert message in str(caught.value) and '\n' not in str(caught.value)
  assert not (tmp_path / 'sweep').exists()


def test_what_a_module_prints_is_not_its_error(tmp_path, monkeypatch):
  loud = "print('hello')\nraise ValueError('broken')"
  (tmp_path / 'loud.py').write_text(loud)
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))
  recipe = tmp_path / 'loud.gin'
  recipe.write_text(
    'from __gin__ import dynamic_registration\nimport loud\nSTEPS = 1\n'
  )
  points = grid.grid(['STEPS = [1, 2]'], tmp_path / 'sweep')
  with pytest.raises(ValueError, match='broken') as caught:
    check.check([str(recipe)], [], points)
  assert 'hello' not in str(caught.value)


def test_a_grid_that_runs_take_passes(tmp_path):
  points = grid.grid(['GROUP = [2, 4]', 'SEED = range(3)'], tmp_path)
  check.check(RECIPE, ['STEPS = 3'], points)


def test_each_value_is_tried_beside_the_first_of_the_others():
  points = grid.grid(['a.b = range(40)', 'c.d = range(50)'], 'sweep')
  tried = [tuple(x.values.values()) for x in check._tried(points)]
  assert sorted(tried) == sorted(
    {(i, 0) for i in range(40)} | {(0, i) for i in range(50)}
  )
