"""Files and modules that texts name exist."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = 'docs|experiments|gin_configs|planner|rlinf_jax|sharding|stages|tests'
FILE = re.compile(
  rf'\b((?:{FOLDERS})/[\w/.-]*\w\.(?:gin|json|md|py|svg|toml))\b'
)
SUFFIXES = {'.gin', '.md', '.py', '.toml'}
MODULE = re.compile(r'`((?:planner|rlinf_jax|sharding|stages)(?:\.\w+)+)`')


def texts():
  """Pages, recipes and sources, without tests: those name files they make."""
  for folder in FOLDERS.split('|'):
    for path in (ROOT / folder).rglob('*'):
      is_ours = '.venv' not in path.parts  # As that of an experiment.
      if path.suffix in SUFFIXES and folder != 'tests' and is_ours:
        yield str(path.relative_to(ROOT)), path.read_text()
  yield 'README.md', (ROOT / 'README.md').read_text()


def is_defined(name: str) -> bool:
  """Whether a dotted name is a module, or a word of its module."""
  parts = name.split('.')
  for n in range(len(parts), 0, -1):
    path = ROOT.joinpath(*parts[:n])
    if path.is_dir():
      path = path / '__init__'
    source = path.with_suffix('.py')
    if source.exists():
      words = source.read_text()
      return all(re.search(rf'\b{x}\b', words) for x in parts[n : n + 1])
  return False


def test_every_file_that_a_text_names_exists():
  missing = {
    (name, path)
    for name, text in texts()
    for path in FILE.findall(text)
    if not (ROOT / path).exists()
  }
  assert not missing


def test_every_module_that_a_text_names_exists():
  missing = {
    (name, module)
    for name, text in texts()
    for module in MODULE.findall(text)
    if not is_defined(module)
  }
  assert not missing
