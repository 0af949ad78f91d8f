"""A number, and what it is made of."""

from collections.abc import Mapping

from planner.costs.measured import Number, Tag


class Explanation(dict):
  """Parts by name; their parts of seconds, or of bytes, as `Number`s.

  Attributes:
    total: of them all. Of 'arithmetic' and 'traffic', which overlap, the longer
      counts.
  """

  def __init__(self, total: Number, parts: Mapping[str, Number]):
    super().__init__(parts)
    self.total = total

  def __str__(self):
    lines = [('total', self.total), *self.items()]
    return '\n'.join(f'{k:32}{n.value:12.4g}  {n.tag}' for k, n in lines)


def scaled(
  found: Explanation, times: Number, why: str, tag: Tag = 'modeled'
) -> Explanation:
  """The same, so many times as much; `why` is told among the parts."""
  return Explanation(
    Number(found.total.value * times.value, tag), {**found, why: times}
  )


def whole(number: Number, what: str) -> Explanation:
  """A number of one part."""
  return Explanation(number, {what: number})
