"""Names that a message suggests in place of one that is not known."""

from collections.abc import Iterable
import difflib


def suggest(name: str, names: Iterable[str], most: int = 8) -> str:
  """The end of a message: the closest of `names`, or all up to `most`."""
  names = list(names)
  by_small = {x.lower(): x for x in names}
  closest = difflib.get_close_matches(name.lower(), by_small, 1, cutoff=0.7)
  if closest:
    return f'; did you mean `{by_small[closest[0]]}`?'
  if 0 < len(names) <= most:
    return f'; available: {join_names(names)}.'
  return '.'


def join_names(names: Iterable[str]) -> str:
  """Joins names with commas, each in backquotes."""
  return ', '.join(f'`{name}`' for name in names)
