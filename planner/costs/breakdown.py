"""A number, and what it is made of."""

from collections.abc import Mapping

from planner.costs.measured import Estimate, Tag


class CostBreakdown(dict):
  """Parts by name; their parts of seconds, or of bytes, as `Estimate`s.

  Attributes:
    total: of them all. Of 'arithmetic' and 'traffic', which overlap, the longer
      counts.
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
  """The same, so many times as much; `why` is told among the parts."""
  return CostBreakdown(
    Estimate(found.total.value * times.value, tag), {**found, why: times}
  )


def single(number: Estimate, what: str) -> CostBreakdown:
  """A number of one part."""
  return CostBreakdown(number, {what: number})
