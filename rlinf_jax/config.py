"""What a gin file says, and what is refused in it.

A recipe names functions and binds their parameters. gin by itself is lax in
ways that waste a run, so here:
- a binding or macro that nothing reads is refused before step 0, with the
  nearest name that is read (`refuse_unused`);
- a binding on the command line may name whatever the files import (gin gives
  it no imports of its own);
- whatever gin cannot read is told in one sentence.
With `config_errors`, this is the only module that knows how gin works.
"""

from collections.abc import Callable, Iterable, Iterator
import functools
import inspect
import os
import pathlib
from typing import Any, NamedTuple

from absl import flags
import gin
from gin import config_parser

from rlinf_jax import config_errors

GIN_FILE = flags.DEFINE_multi_string(
  'gin_file', [], 'gin files to read, in this order.'
)
GIN_BINDINGS = flags.DEFINE_multi_string(
  'gin_bindings', [], 'Bindings to add after the files.'
)
WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for all results.')

_MACRO = 'gin.macro'
_WORKDIR = 'WORKDIR/gin.macro.value'
# Selectors of functions all of whose bindings `call` has read.
_read_entirely: set[str] = set()


def parse(
  gin_files: Iterable[str], gin_bindings: Iterable[str], workdir: str
) -> None:
  """Reads files, then bindings, in place of whatever was read before.

  Files are looked for in the current folder, then beside the package. The
  macro `WORKDIR` is `workdir`, also where a file (an earlier run's config.gin)
  says otherwise.

  Args:
    gin_files: as given on the command line.
    gin_bindings: single bindings; a later one wins over an earlier one and
      over the files.
    workdir: the run folder.

  Raises:
    FileNotFoundError: a sentence; a file or an include does not exist.
    ValueError: a sentence; something in a file or binding cannot be read, or
      names what does not exist.
  """
  gin.clear_config()
  _read_entirely.clear()
  _set_search()
  header = config_errors.DYNAMIC + '\n'
  for name in gin_files:
    path = _find(name)
    with config_errors.told(name):
      header += _imports(gin.parse_config_file(path))
  gin.bind_parameter(_WORKDIR, str(workdir))
  for binding in gin_bindings:
    with config_errors.told(f"--gin_bindings '{binding}'", header):
      gin.parse_config(header + binding)
    header += _import_statements(binding)
  if gin.query_parameter(_WORKDIR) != str(workdir):
    raise ValueError(
      'WORKDIR is the folder that --workdir names; set it there and not by a '
      'binding.'
    )
  _refuse_undefined()
  gin.finalize()


def call(
  function: Callable, *, bindings_of: Callable | None = None, **given
) -> Any:
  """Calls a function with the arguments that the recipe binds.

  Args:
    function: the function.
    bindings_of: the function whose bindings and defaults are used, for each
      parameter that both have; by default `function` itself. All its bindings
      count as read.
    **given: other arguments.

  Raises:
    ValueError: the recipe does not bind the function, or leaves out an argument
      that it or a function called for its arguments needs.
  """
  configured = bindings_of or function
  try:
    bound = gin.get_configurable(configured)
  except ValueError as error:
    raise ValueError(
      f'The recipe binds no parameter of {configured.__module__}.'
      f'{configured.__qualname__}, so there is nothing to run. Name a recipe '
      'with --gin_file.'
    ) from error
  try:
    if bindings_of:
      given = _shared_arguments(function, bindings_of) | given
      bound = function
    return bound(**given)
  except TypeError as error:
    message = config_errors.missing_argument(error)
    if message is None:
      raise
    raise ValueError(message) from error


def _shared_arguments(function, configured) -> dict[str, Any]:
  """Arguments of `configured`, for the parameters that `function` has too."""
  _read_entirely.add(f'{configured.__module__}.{configured.__qualname__}')
  bindings = gin.get_bindings(configured)
  arguments = {}
  parameters = inspect.signature(configured).parameters
  for name in inspect.signature(function).parameters.keys() & parameters:
    default = parameters[name].default
    if name in bindings:
      arguments[name] = bindings[name]
    elif default is not inspect.Parameter.empty:
      arguments[name] = default
    else:
      raise ValueError(config_errors.not_given(configured.__name__, repr(name)))
  return arguments


def error_text(error: BaseException) -> str:
  """The text of an error, without the call chain that gin appends."""
  return str(error).split('\n  In call to configurable')[0]


def text() -> str:
  """Every binding; as a file it runs by itself, as a `--gin_file`."""
  return gin.config_str()


def save(path: str | os.PathLike) -> None:
  """Writes every binding."""
  _write(path, text())


def save_operative(path: str | os.PathLike) -> None:
  """Writes every parameter used so far, defaults included."""
  _write(path, gin.operative_config_str())


def refuse_unused() -> None:
  """Raises ValueError if a binding has no effect; call before step 0.

  To be called when the workflow has been traced, so that all that a run calls
  has been called, or is held by something that has.
  """
  names = unused()
  if not names:
    return
  read = _read_names()
  raise ValueError(
    ' '.join(
      f'`{name}` is set but nothing reads it'
      f'{config_errors.nearest(name, [x for x in read if _alike(x, name)])}'
      for name in names
    )
  )


def unused() -> list[str]:
  """Left-hand sides that no call has read and none to come can read.

  A binding is used if a call has read it, or if its function or macro is
  named, by `@scope/name` or `%MACRO`, in the value of a used binding: such a
  function may be called later or, on resuming, not at all.
  """
  bound = _bindings(gin.config_str())
  used = _used(bound, _bindings(gin.operative_config_str()))
  return [
    binding.name
    for (scope, selector), bindings in bound.items()
    for argument, binding in bindings.items()
    if (scope, selector, argument) not in used and binding.name != 'WORKDIR'
  ]


class _Reference(NamedTuple):
  """`@scope/selector`, `@scope/selector()` or `%scope`."""

  scope: str
  selector: str
  evaluate: bool


class _Binding(NamedTuple):
  """A left-hand side as a person writes it, and the references in its value."""

  name: str
  references: tuple[_Reference, ...]


# (scope, selector) → argument → binding; a macro's argument is 'value'.
_Bindings = dict[tuple[str, str], dict[str, _Binding]]


class _Delegate(config_parser.ParserDelegate):
  """Keeps references as plain data."""

  def configurable_reference(self, scoped_selector, evaluate):
    scope, _, selector = scoped_selector.rpartition('/')
    return _Reference(scope, selector, evaluate)

  def macro(self, name):
    return _Reference(name, _MACRO, True)


def _bindings(text: str) -> _Bindings:
  """Reads what `gin.config_str` wrote."""
  modules = config_errors.imported(text)

  def whole(selector):
    head, dot, rest = selector.partition('.')
    return modules.get(head, head) + dot + rest

  bindings = {}
  for statement in config_parser.ConfigParser(text, _Delegate()):
    if not isinstance(statement, config_parser.BindingStatement):
      continue
    scope, selector, argument, value, _ = statement
    path = f'{scope}/{selector}' if scope else selector
    if argument:
      key, name = (scope, whole(selector)), f'{path}.{argument}'
    else:
      key, argument, name = (path, _MACRO), 'value', path
    references = tuple(
      x._replace(selector=whole(x.selector)) for x in _references(value)
    )
    bindings.setdefault(key, {})[argument] = _Binding(name, references)
  return bindings


def _references(value) -> Iterator[_Reference]:
  if isinstance(value, _Reference):
    yield value
  elif isinstance(value, dict):
    yield from _references([*value, *value.values()])
  elif isinstance(value, list | tuple):
    for x in value:
      yield from _references(x)


def _seen(
  bound: _Bindings, scope: str, selector: str
) -> dict[str, tuple[str, _Binding]]:
  """What a call in `scope` is given: argument → (binding's scope, binding)."""
  seen = {}
  parts = scope.split('/') if scope else []
  for i in range(len(parts) + 1):
    outer = '/'.join(parts[:i])
    for argument, binding in bound.get((outer, selector), {}).items():
      seen[argument] = outer, binding
  return seen


def _used(bound: _Bindings, ran: _Bindings) -> set[tuple[str, str, str]]:
  """(scope, selector, argument) of every binding that is or can be read."""
  used, visited = set(), set()
  # The scope of a call, its selector, the scope in which a function that it
  # is given may be called, and which arguments it reads (None: all).
  waiting = [
    (scope, selector, scope, frozenset(arguments))
    for (scope, selector), arguments in ran.items()
  ]
  waiting += [('', selector, '', None) for selector in _read_entirely]
  while waiting:
    item = scope, selector, holder, arguments = waiting.pop()
    if item in visited:
      continue
    visited.add(item)
    for argument, (outer, binding) in _seen(bound, scope, selector).items():
      if arguments is not None and argument not in arguments:
        continue
      used.add((outer, selector, argument))
      for to in binding.references:
        if to.selector == _MACRO:
          waiting.append((to.scope, _MACRO, holder, None))
        elif to.scope or to.evaluate:
          there = to.scope or scope
          waiting.append((there, to.selector, there, None))
        else:
          # gin evaluates a macro in a scope of the macro's name; a function
          # that the macro stands for is called in the scope of its holder.
          for there in (scope, holder):
            waiting.append((there, to.selector, there, None))
  return used


def _read_names() -> list[str]:
  """Left-hand sides that are read, whether bound or not."""
  bound = _bindings(gin.config_str())
  ran = _bindings(gin.operative_config_str())
  names = {
    bound[scope, selector][argument].name
    for scope, selector, argument in _used(bound, ran)
  }
  names |= {x.name for arguments in ran.values() for x in arguments.values()}
  return sorted(names)


def _alike(name: str, other: str) -> bool:
  """Whether both are macros or both are parameters."""
  return ('.' in name) == ('.' in other)


def _refuse_undefined() -> None:
  """Refuses macros that are read but not set, and what was left REQUIRED."""
  bound = _bindings(gin.config_str())
  macros = [scope for scope, selector in bound if selector == _MACRO]
  faults, required = [], []
  for bindings in bound.values():
    for name, references in bindings.values():
      for to in references:
        if to.selector != _MACRO or to.scope in macros:
          continue
        if to.scope == 'gin.REQUIRED':
          required.append(name)
        else:
          faults.append(
            f'`{name}` reads `%{to.scope}`, which is not set'
            f'{config_errors.nearest(to.scope, macros)}'
          )
  if required:
    faults.append(
      f'The recipe leaves {config_errors.listed(required)} to you; set it, '
      f"for instance with --gin_bindings '{required[0]} = ...'."
    )
  if faults:
    raise ValueError(' '.join(faults))


@functools.cache
def _set_search() -> None:
  gin.add_config_file_search_path(str(config_errors.ROOT))
  # Without the reader that takes folders for Python packages: it logs an error
  # for every folder tried in vain, and fails where `gin_configs` can be
  # imported (as a namespace package), which is so wherever it is installed.
  gin.config._FILE_READERS[:] = [(open, os.path.isfile)]


def _find(name: str) -> str:
  """A path that exists, for the name of a gin file."""
  for folder in (pathlib.Path(), config_errors.ROOT):
    if (folder / name).is_file():
      return str(folder / name)
  raise FileNotFoundError(config_errors.no_file(name))


def _imports(parsed) -> str:
  """The import statements of a parsed file, after those of its includes."""
  text = pathlib.Path(_find(parsed.filename)).read_text()
  includes = ''.join(_imports(x) for x in parsed.includes)
  return includes + _import_statements(text)


def _import_statements(text: str) -> str:
  """The import statements in a gin text, one a line."""
  return ''.join(
    f'{statement}\n'
    for statement, package, *_ in config_errors.IMPORT.findall(text)
    if package != '__gin__'
  )


def _write(path: str | os.PathLike, text: str) -> None:
  """Writes a file that is there whole or not at all."""
  path = pathlib.Path(path)
  part = path.with_name(f'{path.name}.part')
  part.write_text(text)
  part.replace(path)
