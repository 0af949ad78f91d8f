"""Formats bytes, seconds and choices for people, numbers to three digits."""

from collections.abc import Sequence

UNITS = ('B', 'KiB', 'MiB', 'GiB', 'TiB')


def byte_size(n: float) -> str:
  """Formats bytes to three digits: `3.2 MiB`."""
  power = 0
  while n >= 1024 and power < len(UNITS) - 1:
    n, power = n / 1024, power + 1
  form = '.3g' if n < 999.5 else '.0f'  # Not 1.02e+03.
  return f'{n:{form}} {UNITS[power]}'


def digits(n: float) -> str:
  """Formats a number to three digits or more: `12.3`, `119,972`."""
  return f'{n:.3g}' if n < 999.5 else f'{n:,.0f}'


def seconds(n: float) -> str:
  """Formats seconds to three digits: `12.3 ms`."""
  for unit, times in (('s', 1), ('ms', 1e3)):
    if n * times >= 0.9995:
      return f'{digits(n * times)} {unit}'
  return f'{n * 1e6:.3g} µs' if n else '0 s'


def choices(values: Sequence[int]) -> str:
  """Joins alternatives: `1, 2 or 4`."""
  *most, last = map(str, values)
  return f'{", ".join(most)} or {last}' if most else last
