"""What was got over on the way, told to whoever can read it.

That is the terminal, but for a process that has none: its lines go to the
process that began the step.
"""

import queue

_kept: queue.SimpleQueue | None = None


def say(line: str):
  """Prints a line, or keeps it."""
  if _kept is None:
    print(line, flush=True)
  else:
    _kept.put(line)


def keep():
  """From now on lines are kept until they are taken."""
  global _kept
  _kept = queue.SimpleQueue()


def take() -> list[str]:
  """Lines since this was asked last."""
  return [_kept.get() for _ in range(_kept.qsize())]
