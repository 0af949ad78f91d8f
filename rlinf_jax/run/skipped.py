"""Updates that were skipped because their gradient was not finite."""

from collections.abc import Mapping
import os

from rlinf_jax.run_files import failures


class NotFiniteError(ValueError):
  """No update has had a finite gradient for many steps in a row."""


class SkippedUpdates:
  """Reports skipped updates, and ends a run that makes no others.

  Skipped updates leave parameters and moments as they were, so those of the
  newest checkpoint are the last good ones.
  """

  def __init__(self, limit: int, folder: str | os.PathLike):
    """Creates the count of a run.

    Args:
      limit: steps in a row, all of whose updates are skipped, after which the
        run ends.
      folder: the run folder, for the message.
    """
    self._limit, self._folder = limit, folder
    self._in_a_row = 0

  def update(self, step: int, values: Mapping[str, float]) -> str | None:
    """Counts the skipped updates of a step.

    Args:
      step: the step.
      values: its metrics.

    Returns:
      A line to print; None if no update was skipped.

    Raises:
      NotFiniteError: if this was the last of `limit` steps.
    """
    skipped = failures.skipped_share(values)
    if not skipped:
      self._in_a_row = 0
      return None
    self._in_a_row = self._in_a_row + 1 if skipped >= 1.0 else 0
    if self._in_a_row == self._limit:
      raise NotFiniteError(
        f'No gradient was finite from step {step - self._limit + 1} to step '
        f'{step}, so no update has changed the parameters since. The newest '
        f'checkpoint in {self._folder} has the last good ones. Look for '
        'rewards or weights that are NaN or infinite, or continue with '
        '--resume and a lower learning rate; `train.train.max_skipped_steps` '
        f'is {self._limit}.'
      )
    return (
      f'Step {step}: {skipped:.0%} of the updates were skipped, as their '
      'gradient was not finite.'
    )
