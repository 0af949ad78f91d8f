"""Numbers are written for people."""

import pytest

from planner import formatting


@pytest.mark.parametrize(
  'n, text',
  [
    (0, '0 B'),
    (1, '1 B'),
    (1023, '1023 B'),
    (1024, '1 KiB'),
    (1536, '1.5 KiB'),
    (1023 * 1024, '1023 KiB'),
    (5 * 2**30, '5 GiB'),
    (2**50, '1024 TiB'),
  ],
)
def test_byte_sizes_are_formatted_with_units(n, text):
  assert formatting.byte_size(n) == text


@pytest.mark.parametrize(
  ('n', 'text'),
  [
    (0.01234, '12.3 ms'),
    (12.34, '12.3 s'),
    (999.6, '1,000 s'),
    (119972.0, '119,972 s'),
  ],
)
def test_seconds_are_never_written_with_an_exponent(n, text):
  assert formatting.seconds(n) == text
  assert n < 1 or formatting.digits(n) == text.removesuffix(' s')
