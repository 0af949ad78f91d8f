"""Sentences for what gin 0.5 says about a recipe that it cannot read."""

from collections.abc import Iterable, Iterator
import contextlib
import difflib
import inspect
import pathlib
import pkgutil
import re
import sys
import tokenize

# Of a checkout and of an installed wheel alike: `gin_configs` lies in it.
ROOT = pathlib.Path(__file__).resolve().parents[1]
DYNAMIC = 'from __gin__ import dynamic_registration'
IMPORT = re.compile(
  r'^[ \t]*((?:from +(\S+) +)?import +(\S+)(?: +as +(\S+))?)', re.M
)


@contextlib.contextmanager
def told(where: str, header: str = '') -> Iterator[None]:
  """Turns what gin raises into sentences, and lets other errors through.

  Args:
    where: what is being read, to begin the sentence with.
    header: the import statements that hold there; those of a file are read
      from it.
  """
  try:
    yield
  except (
    AttributeError,
    ImportError,
    NameError,
    OSError,
    SyntaxError,
    ValueError,
    tokenize.TokenError,
  ) as error:
    text = str(error)
    place = re.search(r'In file "(.+?)", line (\d+)', text)
    if place is None and isinstance(error, SyntaxError) and error.filename:
      place = None, error.filename, error.lineno
    if place is not None:
      where = f'{place[1]} line {place[2]}'
      header = pathlib.Path(place[1]).read_text()
    missing = re.match(r'Unable to open file: (.+)\. Searched', text)
    if missing is not None:
      raise FileNotFoundError(f'{where}: {no_file(missing[1])}') from error
    sentence = _explain(error, text.partition('\n')[0], imported(header))
    if sentence is None:
      raise
    raise ValueError(f'{where}: {sentence}') from error


def missing_argument(error: TypeError) -> str | None:
  """A sentence if a recipe leaves out an argument; None for faults in code."""
  missing = re.match(
    r'([\w.<>]+)\(\) missing \d+ required [\w -]+: (.+)\n'
    r"(?:.*\n)*?  In call to configurable '(\w+)'",
    f'{error}\n',
  )
  if missing is None or missing[3] not in missing[1].split('.'):
    return None
  return not_given(missing[3], missing[2])


def not_given(function: str, arguments: str) -> str:
  """The message for required arguments that a recipe does not bind."""
  return (
    f'`{function}` is not given {arguments}; bind it in the recipe or with '
    '--gin_bindings.'
  )


def no_file(name: str) -> str:
  """Says where a gin file was looked for, and which is there."""
  folder = pathlib.Path(name).parent
  there = {
    str(folder / path.name)
    for root in (pathlib.Path(), ROOT)
    for path in (root / folder).glob('*.gin')
  }
  there |= {str(x.relative_to(ROOT)) for x in ROOT.glob('gin_configs/**/*.gin')}
  if folder.is_absolute():
    where = folder
  else:
    where = ' and '.join(dict.fromkeys([str(pathlib.Path.cwd()), str(ROOT)]))
  return (
    f'There is no gin file {name} (looked in {where})'
    f'{nearest(name, sorted(there))}'
  )


def nearest(name: str, names: Iterable[str]) -> str:
  """Ends a sentence with the likeliest of `names`, or all if they are few."""
  names = list(names)
  near = difflib.get_close_matches(name, names, 1)
  if near:
    return f'; did you mean `{near[0]}`?'
  return f'; there is {listed(names)}.' if 0 < len(names) <= 8 else '.'


def listed(names: Iterable[str]) -> str:
  return ', '.join(f'`{name}`' for name in names)


def imported(text: str) -> dict[str, str]:
  """Name → module, of the imports in a gin text."""
  modules = {}
  for _, package, name, alias in IMPORT.findall(text):
    if package == '__gin__':
      continue
    if package or alias:
      modules[alias or name] = f'{package}.{name}' if package else name
    else:
      head = name.partition('.')[0]
      modules[head] = head
  return modules


def _explain(
  error: Exception, text: str, modules: dict[str, str]
) -> str | None:
  """A sentence for the first line that gin says, or None if not gin said it."""
  if isinstance(error, SyntaxError):
    return None if f'{error.filename}'.endswith('.py') else _unreadable(error)
  if isinstance(error, tokenize.TokenError):
    return f'a bracket or a string is not closed ({error.args[0]}).'
  if text.startswith('not enough values to unpack'):
    return (
      'the left-hand side names a function; it should name a parameter of '
      'one (`module.function.parameter = value`) or a macro (`NAME = value`).'
    )
  for pattern, explain in _PATTERNS:
    if found := re.match(pattern, text):
      return explain(modules, *found.groups())
  return None


def _unreadable(error: SyntaxError) -> str:
  reason = str(error.msg)
  if found := re.search(r"Failed to parse token '(.+)'", reason):
    return (
      f'`{found[1]}` is not a value; put quotes around a string, `@` before a '
      'function and `%` before a macro.'
    )
  line = (error.text or '').strip()
  quoted = f' in `{line}`' if line else ''
  return f'cannot be read{quoted}: {reason.splitlines()[0]}'


def _not_imported(modules, name):
  for module in modules:
    if hasattr(_get(modules, module), name):
      near = f'; did you mean `{module}.{name}`?'
      break
  else:
    near = nearest(name, modules)
  return f'nothing called `{name}` is imported{near}'


def _not_there(modules, selector, name):
  parent = selector[: f'{selector}.'.rindex(f'.{name}.')]
  public = [x for x in dir(_get(modules, parent)) if not x.startswith('_')]
  near = nearest(f'{parent}.{name}', [f'{parent}.{x}' for x in public])
  return f'there is no `{parent}.{name}`{near}'


def _no_parameter(modules, selector, name):
  function = _get(modules, selector)
  names = [] if function is None else inspect.signature(function).parameters
  return f'`{selector}` has no parameter `{name}`{nearest(name, names)}'


def _not_dynamic(modules, selector):
  del modules
  return (
    f'gin does not know `{selector}`; begin the file with `{DYNAMIC}` and an '
    'import of its module.'
  )


def _no_module(modules, name):
  del modules
  package = name.rpartition('.')[0]
  places = getattr(sys.modules.get(package), '__path__', [])
  near = [f'{package}.{x.name}' for x in pkgutil.iter_modules(places)]
  return f'there is no module `{name}`{nearest(name, near)}'


_PATTERNS = (
  (r"'(\w+)' was not provided by an import statement", _not_imported),
  (r"Couldn't resolve selector ([\w.]+); .* attribute (\w+)\.$", _not_there),
  (
    r"Configurable '(.+)' doesn't have a parameter named '(\w+)'",
    _no_parameter,
  ),
  (r"No configurable matching (?:reference )?'@?(.+?)'", _not_dynamic),
  (r"No module named '(.+)'", _no_module),
)


def _get(modules: dict[str, str], selector: str):
  """The object that a selector names, or None."""
  head, *names = selector.split('.')
  found = sys.modules.get(modules.get(head, ''))
  for name in names:
    found = getattr(found, name, None)
  return found
