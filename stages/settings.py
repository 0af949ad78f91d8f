"""Functions that pass their `**settings` on to others."""

from collections.abc import Callable


def passed_to(*takers: Callable) -> Callable[[Callable], Callable]:
  """Marks a function whose `**settings` are parameters of `takers`.

  Recipes that bind them are then checked by the parameters of these, in
  `rlinf_jax.config`.
  """

  def mark(function):
    function.settings_takers = lambda: takers
    return function

  return mark
