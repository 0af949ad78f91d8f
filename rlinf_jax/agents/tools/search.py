"""Search in a folder of documents, as a tool."""

import atexit
from collections.abc import Iterator
import functools
import logging
import pathlib
import shutil
import sys
import tempfile
import textwrap
import types

from rlinf_jax.agents import tools

SUFFIXES = ('.md', '.txt')
WORD = r'(?u)\b\w+\b'
NOTHING = 'nothing found'


def folder(
  path: str,
  *,
  results: int = 3,
  passage_length: int = 400,
  seconds: float = 10.0,
  processes: int | None = None,
) -> tools.Tool:
  """A tool that finds passages of documents by the words of a query (BM25).

  Documents are the files .md and .txt in a folder and those in it. A passage is
  a paragraph, or a part of a long one. Its title is the last heading (`# …`)
  above it, else the name of the file. The index is built once, in a temporary
  folder, and its processes map it into their memory.

  Args:
    path: the folder.
    results: most passages that a query finds.
    passage_length: most characters of a passage.
    seconds: that one query may take; the first of a process loads the index.
    processes: their number; by default one a CPU, at most 8.

  Raises:
    ValueError: for a folder without documents.
    ImportError: if bm25s is not installed.
  """
  if results < 1 or passage_length < 1:
    raise ValueError(
      f'A search has {results} results of {passage_length} characters: both '
      'must be at least 1.'
    )
  # Recipes make a tool for every episode.
  return _folder(path, results, passage_length, seconds, processes)


@functools.cache
def _folder(path, results, passage_length, seconds, processes) -> tools.Tool:
  found = list(passages(path, passage_length))
  if not found:
    raise ValueError(
      f'{path} has no documents to search: give a folder with files '
      f'{" or ".join(SUFFIXES)} that are not empty.'
    )
  index = tempfile.mkdtemp(prefix='rlinf_jax_search_')
  atexit.register(shutil.rmtree, index, ignore_errors=True)
  built = _bm25s().BM25()
  words = _words([f'{x["title"]} {x["text"]}' for x in found])
  built.index(words, show_progress=False)
  built.save(index, corpus=found, show_progress=False)
  return tools.tool(
    search,
    bound={'index': index, 'results': min(results, len(found))},
    seconds=seconds,
    processes=processes,
  )


def search(query: str, index: str, results: int) -> str:
  """Finds passages in documents.

  Args:
    query: Words to search for.
    index: The folder of the index.
    results: Most passages.
  """
  words = _words([query])
  (rows,), (scores,) = _load(index).retrieve(
    words, k=results, show_progress=False, backend_selection='numpy'
  )
  lines = [
    f'{x["title"]}: {x["text"]}'
    for x, score in zip(rows, scores, strict=True)
    if score > 0
  ]
  return '\n'.join(lines) or NOTHING


def passages(path: str, length: int) -> Iterator[dict[str, str]]:
  """Titles and texts of all passages, in the order of the files' names."""
  for file in sorted(pathlib.Path(path).rglob('*')):
    if file.suffix not in SUFFIXES or not file.is_file():
      continue
    title, lines = file.stem, []
    # One more line ends the last paragraph.
    for line in [*file.read_text(errors='replace').splitlines(), '']:
      if line.strip() and not line.startswith('#'):
        lines.append(line)
        continue
      for text in textwrap.wrap(' '.join(lines), length):
        yield {'title': title, 'text': text}
      lines = []
      title = line.strip('# ') or title


def _words(texts: list[str]) -> list[list[str]]:
  return _bm25s().tokenize(
    texts, token_pattern=WORD, stopwords=None, return_ids=False,
    show_progress=False,
  )  # fmt: skip


@functools.cache
def _load(index: str):
  """The index, mapped into the memory of this process."""
  return _bm25s().BM25.load(index, load_corpus=True, mmap=True)


@functools.cache
def _bm25s() -> types.ModuleType:
  """The library, which would start the devices of JAX if it found it."""
  names = ('jax', 'jax.lax', 'numba')
  found = {name: sys.modules.get(name) for name in names}
  sys.modules.update(dict.fromkeys(names))
  try:
    import bm25s
  except ImportError as error:
    raise ImportError(
      'Searching needs bm25s: pip install "rlinf-jax[search]".'
    ) from error
  finally:
    for name, module in found.items():
      del sys.modules[name]
      if module is not None:
        sys.modules[name] = module
  logging.getLogger('bm25s').setLevel(logging.WARNING)
  return bm25s
