"""Marks functions of environments that pass `**settings` on to a simulator."""

from collections.abc import Callable


def passes_settings_to(
  make: Callable[[], Callable],
) -> Callable[[Callable], Callable]:
  """Marks a function that passes its `**settings` to `make()`, or to a pool.

  Recipes are then checked by the parameters of both (`rlinf_jax.config`),
  before a simulator is imported. It is `stages.settings.passed_to` without
  JAX, which that package imports and workers do not.

  Args:
    make: returns the function, which may be defined later.
  """

  def mark(function):
    function.settings_takers = lambda: (make(), _pool())
    return function

  return mark


def _pool() -> Callable:
  # Here, as workers import this module and need no JAX.
  from rlinf_jax.envs.processes import pool

  return pool.EnvPool.__init__
