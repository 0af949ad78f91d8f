"""Python's garbage collector, while stages are counted and plans searched."""

from collections.abc import Iterator
import contextlib
import gc

NEVER = 2**31 - 1  # The largest threshold, of collections of younger objects.
YOUNG = 50_000  # Objects between two collections: most die without one by then.


@contextlib.contextmanager
def only_young() -> Iterator[None]:
  """Collects young objects alone, as a context or a decorator.

  The programs of stages that are counted, a million objects of a
  vision-language-action model, are all kept. Each time that they have grown by
  a quarter, the collector would look through all of them, which was a fifth of
  the seconds of counting and searching. Garbage that older objects refer to in
  a circle, such as the tables of a search, waits until the end.
  """
  young, middle, old = gc.get_threshold()
  gc.set_threshold(max(young, YOUNG), middle, NEVER)
  try:
    yield
  finally:
    gc.set_threshold(young, middle, old)
