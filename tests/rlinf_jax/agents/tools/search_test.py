import collections
import math
import re
import sys

import numpy as np
import pytest

from rlinf_jax.agents import formats, tool_env
from rlinf_jax.agents.tools import search
from rlinf_jax.isolation import pool

WORDS = 'red green blue tea milk rain snow wind hill lake'.split()


@pytest.fixture(scope='module')
def documents(tmp_path_factory):
  """Some files of random words, and of others that are to be found."""
  folder = tmp_path_factory.mktemp('documents')
  rng = np.random.default_rng(0)
  (folder / 'inner').mkdir()
  for n in range(12):
    paragraphs = [
      ' '.join(rng.choice(WORDS, rng.integers(3, 12))) for _ in range(4)
    ]
    (folder / f'file_{n}.txt').write_text('\n\n'.join(paragraphs))
  (folder / 'inner' / 'owls.md').write_text(
    '# Owls\nAn owl hunts\nat night.\n\nIt hears well.\n## Food\nMice of all'
    ' kinds.\n'
  )
  (folder / 'picture.png').write_bytes(b'owl')
  return folder


@pytest.fixture(scope='module')
def tool(documents):
  return search.folder(str(documents), results=3, seconds=60.0, processes=1)


def test_passages_have_the_titles_above_them(documents, tool):
  assert tool.call({'query': 'owl'}) == 'Owls: An owl hunts at night.'
  assert tool.call({'query': 'Which owls eat mice?'}).splitlines() == [
    'Food: Mice of all kinds.',
    'Owls: It hears well.',
    'Owls: An owl hunts at night.',
  ]
  assert tool.call({'query': 'zebra'}) == search.NOTHING
  assert tool.call({'query': ''}) == search.NOTHING


def scores(texts, query, k1=1.5, b=0.75):
  """BM25 of every text, as Lucene has it."""
  split = lambda text: re.findall(r'\w+', text.lower())
  counts = [collections.Counter(split(text)) for text in texts]
  mean = sum(count.total() for count in counts) / len(counts)
  out = np.zeros(len(texts))
  for word in set(split(query)):
    n = sum(word in count for count in counts)
    idf = math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
    for i, count in enumerate(counts):
      norm = k1 * (1 - b + b * count.total() / mean)
      out[i] += idf * count[word] / (count[word] + norm)
  return out


def test_the_passages_are_the_best_by_bm25(documents, tool):
  found = list(search.passages(str(documents), 400))
  texts = [f'{x["title"]} {x["text"]}' for x in found]
  lines = [f'{x["title"]}: {x["text"]}' for x in found]
  rng = np.random.default_rng(1)
  for _ in range(20):
    query = ' '.join(rng.choice([*WORDS, 'owl', 'night'], 3, replace=False))
    expected = scores(texts, query)
    said = tool.call({'query': query}).splitlines()
    # Passages of equal scores may change places.
    mine = [expected[lines.index(line)] for line in said]
    best = np.sort(expected)[::-1][: len(said)]
    np.testing.assert_allclose(mine, best, rtol=1e-5)


def test_long_paragraphs_are_cut_at_words(tmp_path):
  (tmp_path / 'long.txt').write_text('lake hill ' * 50)
  found = list(search.passages(str(tmp_path), 30))
  assert all(len(x['text']) <= 30 for x in found)
  assert ' '.join(x['text'] for x in found).split() == ['lake', 'hill'] * 50


def test_the_model_sees_and_gives_the_query_alone(tool):
  schema = tool.schema['function']
  assert list(schema['parameters']['properties']) == ['query']
  assert schema['parameters']['required'] == ['query']
  assert 'Owls' in tool.call({'query': 'owl', 'index': '/', 'results': 99})
  with pytest.raises(pool.CallError, match='TypeError'):
    tool.call({'words': 'owl'})


def test_an_agent_searches(tool):
  env = tool_env.ToolEnv([tool], parse=formats.pythonic)
  env.reset({'question': 'When does an owl hunt?', 'answer': 'night'})
  step = env.step('[search(query="owl hunts")]')
  assert step.messages[0]['content'].startswith('Owls: An owl hunts')
  assert env.step('night').reward == 1.0


def test_folders_that_cannot_be_searched_are_refused(tmp_path, monkeypatch):
  with pytest.raises(ValueError, match='has no documents to search'):
    search.folder(str(tmp_path))
  with pytest.raises(ValueError, match='must be at least 1'):
    search.folder(str(tmp_path), results=0)
  (tmp_path / 'a.txt').write_text('a')
  search._bm25s.cache_clear()
  monkeypatch.setitem(sys.modules, 'bm25s', None)
  with pytest.raises(ImportError, match='rlinf-jax.search'):
    search.folder(str(tmp_path))
  search._bm25s.cache_clear()


def test_the_library_does_not_start_jax_and_jax_is_found_afterwards():
  import jax

  search._bm25s()
  assert sys.modules['jax'] is jax
