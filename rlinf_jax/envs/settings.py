"""Settings that a simulator's environments pass on, to check recipes by."""

from collections.abc import Callable


def passes_settings_to(
  make: Callable[[], Callable],
) -> Callable[[Callable], Callable]:
  """Marks a function that passes its `**settings` to `make()`, or to a pool.

  Recipes are then checked by the parameters of both (`rlinf_jax.config`),
  before a simulator is imported.

  Args:
    make: returns the function, which may be defined later.
  """

  def mark(function):
    function.settings_takers = lambda: (make(), _pool())
    return function

  return mark


def _pool() -> Callable:
  from rlinf_jax.envs.processes import pool  # Not in a worker: it imports JAX.

  return pool.EnvPool.__init__
