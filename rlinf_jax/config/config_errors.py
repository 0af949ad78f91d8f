"""Clear messages for the errors that gin 0.5 raises about recipes."""

from collections.abc import Iterator
import contextlib
import inspect
import pathlib
import pkgutil
import re
import sys
import tokenize

import safetensors

from rlinf_jax.config import recipe_files, suggestions

DYNAMIC = 'from __gin__ import dynamic_registration'
LONGEST = 200  # Characters of a value or a line in a message.
MOST_PARAMETERS = 48  # That a message lists: a guess may be none of them.
IMPORT = re.compile(
  r'^[ \t]*((?:from +(\S+) +)?import +(\S+)(?: +as +(\S+))?)', re.M
)


@contextlib.contextmanager
def rephrased(where: str, header: str = '') -> Iterator[None]:
  """Replaces errors of gin by clear ones; other errors pass unchanged.

  Args:
    where: what is being read, for the start of the message.
    header: import statements that apply there; those of a file are read from
      the file and those that it includes.
  """
  try:
    yield
  except (
    AttributeError,
    ImportError,
    NameError,
    OSError,
    SyntaxError,
    TypeError,
    ValueError,
    tokenize.TokenError,
  ) as error:
    text = str(error)
    location = re.search(r'In file "(.+?)", line (\d+)', text)
    if location is None and isinstance(error, SyntaxError) and error.filename:
      location = None, error.filename, error.lineno
    # An error about indentation names the file `<tokenize>`.
    if location is not None and pathlib.Path(location[1]).is_file():
      where = f'{location[1]} line {location[2]}'
      header = recipe_files.with_includes(location[1])
    missing = re.match(r'Unable to open file: (.+)\. Searched', text)
    if missing is not None:
      raise FileNotFoundError(
        f'{where}: {recipe_files.no_file(missing[1])}'
      ) from error
    message = _explain(error, text.partition('\n')[0], imported(header))
    if message is None:
      raise
    raise ValueError(f'{where}: {message}') from error


def missing_argument(error: TypeError) -> str | None:
  """The message for an argument that a recipe leaves out.

  None if the error has another cause, such as a bug.
  """
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


def text(error: BaseException) -> str:
  """The text of an error, without the call chain that gin appends."""
  message = str(error).split('\n  In call to configurable')[0]
  # Of an error that gin has augmented, the text alone has the file.
  if system := re.fullmatch(
    r"\[Errno \d+\] (.+?)(?:: ['\"](.+)['\"])?", message
  ):
    what, names = system.groups()
    # Of a file that should take the place of another, that one.
    name = names and re.split(r"['\"] -> ['\"]", names)[-1]
    if name is None:
      return f'{what}: mend that, and continue with --resume.'
    return f'{cut(name)} cannot be used ({what}): mend it, or name another.'
  if isinstance(error, MemoryError):
    return (
      'The system refused memory to this process: free some, or raise its '
      f'limit (ulimit -v), and continue with --resume. {message}'.rstrip()
    )
  if isinstance(error, safetensors.SafetensorError):  # Of writing weights.
    return f'{message}: mend that, and continue with --resume.'
  if isinstance(error, OverflowError):
    return (
      f'A number of the recipe or of its files is too large: {cut(message)}.'
    )
  return message


def cut(text: str) -> str:
  """A text as it stands in a message: on one line, and not too long."""
  text = text.replace('\n', '\\n')
  return text if len(text) <= LONGEST else f'{text[:LONGEST]}…'


def imported(text: str) -> dict[str, str]:
  """Name → module of the imports in a gin text."""
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
  """The message for an error of gin, by its first line; None for others."""
  if isinstance(error, SyntaxError):
    return None if f'{error.filename}'.endswith('.py') else _syntax_error(error)
  if isinstance(error, tokenize.TokenError):
    return f'a bracket or a string is not closed ({error.args[0]}).'
  if text.startswith('not enough values to unpack'):
    return (
      'a name is too short: on the left, it should name a parameter of a '
      'function (`module.function.parameter = value`) or a macro (`NAME = '
      'value`), and behind `@`, a function of a module (`@module.function`).'
    )
  if text.startswith('unhashable type'):
    return 'the keys of a dictionary must be numbers, texts or None.'
  for pattern, explain in _PATTERNS:
    if match := re.match(pattern, text):
      return explain(modules, *match.groups())
  return None


def _syntax_error(error: SyntaxError) -> str:
  if isinstance(error, IndentationError):
    return (
      f'the spaces before line {error.lineno} are not those of an earlier '
      'line: align the bindings of a function.'
    )
  line = cut((error.text or '').strip())
  if 'import' in line.split() or line.startswith('include'):
    return (
      f'cannot be read in `{line}`: write `from package import module` or '
      "`include 'file.gin'`."
    )
  token = re.search(r"Failed to parse token '(.+)'", str(error.msg))
  match = _BINDING.fullmatch(line)
  if token and (match is None or match[2][:1] in ('[', '(', '{')):
    return _no_value(token[1], None)
  if match is None:
    quoted = f' in `{line}`' if line else ''
    return (
      f'cannot be read{quoted}: write `NAME = value` or '
      '`module.function.parameter = value`.'
    )
  return _no_value(match[2], match[1])


def _no_value(text: str, name: str | None) -> str:
  """The message for a text that stands where a value should.

  Args:
    text: the text, perhaps with a comment behind it.
    name: the left-hand side, where the whole right-hand side is the text.
  """
  text = cut(text.partition(' #')[0].strip())
  if not text:
    return f'no value is given: write `{name} = value`.'
  if plain := _PLAIN.get(text.lower()):
    return f'`{text}` is not a value; did you mean `{plain}`?'
  if name and _PATH_OR_WORD.fullmatch(text):
    return f'`{text}` is not a value: write `{name} = "{text}"`.'
  if name:
    return (
      f'`{text}` is not a value: write a number, a string in quotes, '
      '`@module.function`, `%MACRO`, or several of them in brackets.'
    )
  return (
    f'`{text}` is not a value; put quotes around a string, `@` before a '
    'function and `%` before a macro.'
  )


def _not_imported(modules, name):
  for module in modules:
    if hasattr(_get(modules, module), name):
      suggestion = f'; did you mean `{module}.{name}`?'
      break
  else:
    suggestion = suggestions.suggest(name, modules)
  return f'`{name}` is not imported{suggestion}'


def _not_there(modules, selector, name):
  parent = selector[: f'{selector}.'.rindex(f'.{name}.')]
  public = [x for x in dir(_get(modules, parent)) if not x.startswith('_')]
  suggestion = suggestions.suggest(
    f'{parent}.{name}', [f'{parent}.{x}' for x in public]
  )
  return f'there is no `{parent}.{name}`{suggestion}'


def _no_parameter(modules, selector, name):
  function = _get(modules, selector)
  names = [] if function is None else inspect.signature(function).parameters
  suggestion = suggestions.suggest(name, names, MOST_PARAMETERS)
  return f'`{selector}` has no parameter `{name}`{suggestion}'


def _not_dynamic(modules, selector):
  del modules
  return (
    f'gin does not know `{selector}`: start the file with `{DYNAMIC}` and an '
    'import of its module.'
  )


def _no_module(modules, name):
  del modules
  package = name.rpartition('.')[0]
  if not package:
    return (
      f'there is no module `{name}`: install it, or start the command in the '
      'folder that has it, or name that folder in PYTHONPATH.'
    )
  paths = getattr(sys.modules.get(package), '__path__', [])
  siblings = [f'{package}.{x.name}' for x in pkgutil.iter_modules(paths)]
  return f'there is no module `{name}`{suggestions.suggest(name, siblings)}'


_BINDING = re.compile(r'((?:\w+/)*[^\W\d]\w*(?:\.\w+)*)\s*=(?!=)\s*(.*)')
_PATH_OR_WORD = re.compile(r'(?:[^\W\d]|[/~]|\.\.?/)[^"\'\\()=;]*')
_PLAIN = {
  'true': 'True',
  'yes': 'True',
  'false': 'False',
  'no': 'False',
  'none': 'None',
  'null': 'None',
}
_PATTERNS = (
  (r"'(\w+)' was not provided by an import statement", _not_imported),
  (r"Couldn't resolve selector ([\w.]+); .* attribute (\w+)\.$", _not_there),
  (
    r"Configurable '(.+)' doesn't have a parameter named '(\w+)'",
    _no_parameter,
  ),
  (r"No configurable matching (?:reference )?'@?(.+?)'", _not_dynamic),
  (r"No module named '([^']+)'", _no_module),
)


def _get(modules: dict[str, str], selector: str):
  """The object that a selector names, or None."""
  head, *names = selector.split('.')
  value = sys.modules.get(modules.get(head, ''))
  for name in names:
    value = getattr(value, name, None)
  return value
