"""Random literals for parameters are taken, or refused in one line."""

import functools
from typing import Any

import hypothesis
from hypothesis import strategies
import pytest

from rlinf_jax.config import (
  config,
  config_bindings,
  config_parameters,
  config_types,
)
from tests.doors import bindings_test

# Values that gin can write: literals of Python, without infinity and NaN.
SCALARS = (
  strategies.none()
  | strategies.booleans()
  | strategies.integers()
  | strategies.floats(allow_nan=False, allow_infinity=False)
  | strategies.text(max_size=20)
)
LITERALS = strategies.recursive(
  SCALARS,
  lambda some: (
    strategies.lists(some, max_size=3)
    | strategies.tuples(some, some)
    | strategies.dictionaries(strategies.text(max_size=5), some, max_size=3)
  ),
  max_leaves=5,
)


@functools.cache
def parameters() -> list[tuple[str, str, Any]]:
  """Lists a recipe, the name of a binding to a literal, and its annotation."""
  found = {}
  for recipe in bindings_test.recipes():
    config.parse([recipe], bindings_test.given_to(recipe), '/runs/x')
    bound = config_bindings.parse(config.text())
    for (_, selector), arguments in bound.items():
      annotations = config_parameters.annotations(selector)
      for argument, binding in arguments.items():
        annotation = annotations.get(argument)
        if annotation is not None and not binding.references:
          found.setdefault(
            (selector, argument), (recipe, binding.name, annotation)
          )
  return list(found.values())


def test_any_literal_is_taken_or_refused_in_a_sentence(request):
  known = parameters()
  assert len(known) > 100

  @hypothesis.settings(
    max_examples=1000 if request.config.getoption('--claims') else 60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
  )
  @hypothesis.given(strategies.sampled_from(known), LITERALS)
  def bind(parameter, value):
    recipe, name, annotation = parameter
    bindings = [*bindings_test.given_to(recipe), f'{name} = {value!r}']
    try:
      config.parse([recipe], bindings, '/runs/x')
    except ValueError as error:
      line, *more = str(error).splitlines()
      assert line.startswith('--gin_bindings ') and not more
      assert f'`{name} = ' in line
    else:
      assert config_types.accepts(annotation, value)

  bind()


@pytest.mark.parametrize(
  ('annotation', 'strategy'),
  [
    (int, strategies.integers(-(2**31), 2**31 - 1)),
    (float, strategies.floats(allow_nan=False, allow_infinity=False)),
    (str, strategies.text()),
    (bool, strategies.booleans()),
    (list[int], strategies.lists(strategies.integers(-9, 9))),
    (
      dict[str, bool],
      strategies.dictionaries(strategies.text(), strategies.booleans()),
    ),
  ],
)
def test_an_annotation_takes_every_value_of_its_type(annotation, strategy):
  @hypothesis.settings(derandomize=True, database=None, deadline=None)
  @hypothesis.given(strategy)
  def take(value):
    assert config_types.accepts(annotation, value)

  take()
