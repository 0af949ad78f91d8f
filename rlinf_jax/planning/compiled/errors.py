"""Errors of a compiler that refuses a program."""

import re

LONGEST_MESSAGE = 400  # Characters of a compiler's message.
# In which XLA for TPUs says how much memory of a device a program needs. Of a
# kernel that needs too much vmem, which is on the chip, it says the same.
NEEDED = re.compile(
  r'\bUsed ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm'
  r'|\(([\d.]+)([KMGT])\) exceeds available HBM'
)


def message(error: Exception) -> str:
  """Returns the first sentences of a compiler's error."""
  text = ' '.join(str(error).split())
  if len(text) > LONGEST_MESSAGE:
    text = f'{text[:LONGEST_MESSAGE].rsplit(" ", 1)[0]} …'
  return text


def needed_bytes(error: Exception) -> float | None:
  """Returns the bytes that a program needs, if its compiler's error says so."""
  found = NEEDED.search(str(error))
  if not found:
    return None
  number, unit = filter(None, found.groups())
  return float(number) * 1024 ** ' KMGT'.index(unit)
