"""Every Python and gin block of the documentation runs."""

import os
import pathlib

import pytest
import sybil
from sybil.parsers import markdown

import one_simulator
from rlinf_jax.config import config
from rlinf_jax.envs import simulator
from tests.rlinf_jax import recipes_test

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
# A gin block is a recipe, or is read after the one that a comment above names:
# `<!-- recipe: ppo_push -->`.
RECIPE = '<!-- recipe:'
DEFAULT = 'grpo_arithmetic'
simulators = one_simulator.ended  # The fixture.


def base_recipe(text: str, start: int) -> str:
  """Path of the recipe that the bindings of the block at `start` belong to."""
  above = text[:start].rstrip().rpartition('\n')[2]
  name = DEFAULT
  if above.startswith(RECIPE):
    name = above.removeprefix(RECIPE).removesuffix('-->').strip()
  return f'gin_configs/{name}.gin'


def trace(example):
  """Reads a gin block and records the flows of its run."""
  text, folder = example.parsed, example.namespace['folder']
  path = folder / f'block_{example.line}.gin'
  path.write_text(text)
  files = [str(path)]
  if 'include' not in text:  # It is read after a recipe.
    files.insert(0, base_recipe(example.document.text, example.start))
  # Python blocks use theirs, and have their own.
  with one_simulator.POOLS.shared():
    try:
      recipes_test.flows(files[0], [], folder, *files[1:])
    except simulator.UnavailableError as error:
      without_meshes = not os.environ.get(recipes_test.MESHES)
      if not (without_meshes and 'no assets of LIBERO' in str(error)):
        raise
      example.namespace['unavailable'] = str(error)
      return
  config.refuse_unused()


# Its Python blocks run in `your_algorithm_test`.
LEARNS = 'your_algorithm.md'


def examples(page: pathlib.Path):
  parsers = [markdown.CodeBlockParser('gin', trace)]
  if page.name != LEARNS:
    parsers.append(markdown.PythonCodeBlockParser())
  return list(sybil.Sybil(parsers=parsers).parse(page).examples())


WITH_BLOCKS = [
  pytest.param(page, id=page.name) for page in PAGES if examples(page)
]


@pytest.mark.slow
@pytest.mark.parametrize('page', WITH_BLOCKS)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for example in (blocks := examples(page)):
    example.namespace['folder'] = tmp_path
    example.evaluate()
  if missing := blocks[0].namespace.get('unavailable'):
    pytest.skip(f'All other blocks ran. {missing}')
