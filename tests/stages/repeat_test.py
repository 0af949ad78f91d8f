"""A repeat that is called with arrays loops until its predicate."""

import jax.numpy as jnp
import numpy as np
import pytest

from stages import repeat
from tests.planner import loops

pytestmark = pytest.mark.usefixtures('in_float64')


@pytest.mark.parametrize('most, rounds', [(1, 1), (3, 3), (9, 5)])
def test_called_with_arrays_a_repeat_loops_until_its_predicate(most, rounds):
  x = np.arange(8.0) + 1
  for _ in range(rounds):
    x = x / 2
    x = x + x.sum()
  result, n = loops.step(jnp.ones(()), loops.inputs(most))
  assert n == rounds
  np.testing.assert_allclose(result, x.sum() / 2, rtol=1e-6)


def test_without_a_predicate_a_repeat_runs_at_most_rounds():
  loop = repeat.Repeat(lambda x: (loops.halve(x), None), 'loop', at_most=3)
  np.testing.assert_array_equal(loop(jnp.ones(2) * 8), [1, 1])


@pytest.mark.parametrize('at_most, expect', [(0, None), (2, 3), (2, 0)])
def test_impossible_numbers_of_rounds_are_refused(at_most, expect):
  with pytest.raises(ValueError, match='Loop loop runs at most .* impossible'):
    repeat.Repeat(loops.counted, 'loop', at_most, expect)
