"""Scores of held-out sets, and of tasks, among the metrics of a run."""

from collections.abc import Iterable
import re

SCORE = re.compile(r'eval/(.+)/(?:accuracy|success_once)')


def names(metrics: Iterable[str]) -> dict[str, str]:
  """The name of each set or task, by the metric that is its score.

  Args:
    metrics: names of metrics; those that are no score of a set are left out.
  """
  matches = map(SCORE.fullmatch, metrics)
  return {match[0]: match[1] for match in matches if match}
