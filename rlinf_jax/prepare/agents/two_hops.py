"""Questions of two facts in a made-up encyclopaedia, for a model that searches.

`bako town?` asks for the town of the firm that Bako works for. One fact says
`bako: firm dovi`, another `dovi: town rulo`. A demonstrator guesses a town, or
searches for `bako firm`, then for `dovi town`, and repeats the town.
"""

from collections.abc import Sequence
import functools
import pathlib

import numpy as np

from rlinf_jax.agents.tools import search as search_lib
from stages import ranges

PEOPLE = 1000  # As many firms, so 2,000 facts.
TOWNS = 20
HELD_OUT = 256  # People that no training question names.
SYLLABLES = [a + b for a in 'bdfgjklmnprstvwz' for b in 'aiou']
ERROR = 'error: there is no such tool, only search'


@functools.cache
def facts() -> list[tuple[str, str, str]]:
  """Person, firm and town of the firm; no name is two of them."""
  rng = np.random.default_rng(0)
  pairs = [a + b for a in SYLLABLES for b in SYLLABLES]
  names = rng.choice(pairs, 2 * PEOPLE + TOWNS, replace=False).tolist()
  towns = rng.choice(names[2 * PEOPLE :], PEOPLE).tolist()
  people, firms = names[:PEOPLE], names[PEOPLE : 2 * PEOPLE]
  return list(zip(people, firms, towns, strict=True))


def documents(workdir: str) -> str:
  """The folder of the encyclopaedia, made if it does not exist.

  Args:
    workdir: the run folder.
  """
  folder = pathlib.Path(workdir) / 'encyclopaedia'
  if not folder.is_dir():
    part = folder.with_name('encyclopaedia.part')
    part.mkdir(parents=True, exist_ok=True)
    people = [f'# {person}\nfirm {firm}\n' for person, firm, _ in facts()]
    firms = [f'# {firm}\ntown {town}\n' for _, firm, town in facts()]
    (part / 'people.md').write_text('\n'.join(people))
    (part / 'firms.md').write_text('\n'.join(firms))
    part.replace(folder)
  return str(folder)


def draw(
  rng: np.random.Generator, rows: int, held_out: bool
) -> list[dict[str, str]]:
  """Questions about random people; those held out are asked once each.

  Raises:
    ValueError: for more rows held out than there are people.
  """
  if held_out and rows > HELD_OUT:
    raise ValueError(
      f'{rows} problems are held out, and {HELD_OUT} people are: set '
      'problems.problems.held_out to at most as many.'
    )
  known = facts()[:HELD_OUT] if held_out else facts()[HELD_OUT:]
  chosen = rng.choice(len(known), rows, replace=not held_out)
  rows = [known[i] for i in chosen.tolist()]
  return [{'question': f'{p} town?', 'answer': town} for p, _, town in rows]


def script(
  rng: np.random.Generator,
  problem: dict[str, str],
  tool_share: ranges.Fraction = 0.1,
) -> list[str]:
  """The turns of a demonstrator, who seldom searches.

  Args:
    rng: draws whether it does, and the town that it guesses otherwise.
    problem: the problem.
    tool_share: probability that it searches, twice.
  """
  if rng.random() >= tool_share:
    return [str(rng.choice(_towns()))]
  person = problem['question'].removesuffix(' town?')
  query = [f'{person} firm', f'{_firms()[person]} town']
  return [*map(call, query), problem['answer']]


def call(query: str) -> str:
  """A call of the search, as `formats.pythonic` reads it."""
  return f'[search(query="{query}")]'


def corpus() -> Sequence[str]:
  """Texts to train a tokenizer on, which makes each syllable a token."""
  facts_said = ['\n' + 'x: firm x' + '\n', '\n' + 'x: town x' + '\n']
  forms = [call('x firm'), call('x town'), 'x town?', *facts_said]
  alphabet = 'abcdefghijklmnopqrstuvwxyz'
  letters = [alphabet, alphabet.upper(), '+-*/(). :,;\'"=[]_<>', ERROR]
  rest = [f'\n{search_lib.NOTHING}\n', *letters]
  return [*SYLLABLES] * 50 + forms * 20 + rest


@functools.cache
def _towns() -> list[str]:
  return sorted({town for _, _, town in facts()})


@functools.cache
def _firms() -> dict[str, str]:
  return {person: firm for person, firm, _ in facts()}
