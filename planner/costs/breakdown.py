"""A cost and its components."""

from collections.abc import Mapping

from planner.costs.measured import Estimate, Tag


class CostBreakdown(dict):
  """Components of seconds or of bytes, as `Estimate`s by name.

  Attributes:
    total: their total. 'arithmetic' and 'traffic' overlap, so only the longer
      of the two counts.
  """

  def __init__(self, total: Estimate, parts: Mapping[str, Estimate]):
    super().__init__(parts)
    self.total = total

  def __str__(self):
    lines = [('total', self.total), *self.items()]
    return '\n'.join(f'{k:32}{n.value:12.4g}  {n.tag}' for k, n in lines)


def scaled(
  found: CostBreakdown, times: Estimate, why: str, tag: Tag = 'modeled'
) -> CostBreakdown:
  """Multiplies a total by a factor, listed among the components as `why`."""
  return CostBreakdown(
    Estimate(found.total.value * times.value, tag), {**found, why: times}
  )


def single(number: Estimate, what: str) -> CostBreakdown:
  """Returns a breakdown with a single component."""
  return CostBreakdown(number, {what: number})
