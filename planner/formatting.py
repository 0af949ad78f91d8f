"""Formats bytes and seconds for people, to three digits."""

UNITS = ('B', 'KiB', 'MiB', 'GiB', 'TiB')


def byte_size(n: float) -> str:
  """Formats bytes to three digits: `3.2 MiB`."""
  power = 0
  while n >= 1024 and power < len(UNITS) - 1:
    n, power = n / 1024, power + 1
  digits = '.3g' if n < 999.5 else '.0f'  # Not 1.02e+03.
  return f'{n:{digits}} {UNITS[power]}'


def seconds(n: float) -> str:
  """Formats seconds to three digits: `12.3 ms`."""
  for unit, times in (('s', 1), ('ms', 1e3)):
    if n * times >= 0.9995:
      return f'{n * times:.3g} {unit}' if n < 999.5 else f'{n:,.0f} s'
  return f'{n * 1e6:.3g} µs' if n else '0 s'
