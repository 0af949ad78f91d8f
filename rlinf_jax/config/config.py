"""gin configuration: reading recipes, calling functions with their bindings.

A recipe is a gin file that names functions and binds their parameters. In
addition to gin, this module
- refuses a value that the annotation of its parameter excludes
  (`config_types`, `config_multiples`), and macros that are not set or read
  themselves (`config_macros`), when a recipe is read;
- refuses a binding or macro that nothing reads, before step 0, and suggests the
  nearest name that is read (`refuse_unused`);
- lets bindings on the command line use the imports of the files;
- reports errors of gin in one sentence.
Only the modules `config` and `config_*` use gin.
"""

from collections.abc import Callable, Iterable
import copy
import functools
import inspect
import math
import os
import pprint
import types
from typing import Any

from absl import flags
import gin

from rlinf_jax.config import (
  config_bindings,
  config_errors,
  config_macros,
  config_multiples,
  config_types,
  recipe_files,
  suggestions,
)
from rlinf_jax.system import whole_file

GIN_FILE = flags.DEFINE_multi_string(
  'gin_file', [], 'gin files, read in this order.'
)
GIN_BINDINGS = flags.DEFINE_multi_string(
  'gin_bindings', [], 'gin bindings, read after the files.'
)
WORKDIR = flags.DEFINE_string('workdir', None, 'The run folder.')

# gin sorts the keys of a dict as it writes it. But the order of files, sets and
# places counts, and a saved recipe must be the same one.
gin.config.pprint = types.SimpleNamespace(
  pformat=functools.partial(pprint.pformat, sort_dicts=False)
)

SCOPE = '# Parameters are read in the scope'  # Begins a line of a saved file.
_WORKDIR = 'WORKDIR/gin.macro.value'
# Selectors of functions all of whose bindings `call` has read.
_read_entirely: set[str] = set()


def parse(
  gin_files: Iterable[str], gin_bindings: Iterable[str], workdir: str
) -> None:
  """Reads files, then bindings, and replaces the current configuration.

  Files are looked for in the current folder, then beside the package. The
  macro `WORKDIR` is set to `workdir`, even if a file (an earlier run's
  config.gin) sets it to another folder.

  Args:
    gin_files: names of files.
    gin_bindings: single bindings; later ones override earlier ones and the
      files.
    workdir: the run folder.

  Raises:
    FileNotFoundError: if a file or an include does not exist.
    ValueError: if a file or binding has a syntax error, names a module,
      function, parameter or macro that does not exist, or has a value that its
      parameter does not take.
  """
  gin.clear_config()
  _read_entirely.clear()
  _set_search()
  header, where = config_errors.DYNAMIC + '\n', {}
  for name in gin_files:
    recipe_files.check(name)
    path = recipe_files.find(name)
    with config_errors.rephrased(name):
      header += _imports(gin.parse_config_file(path), where)
  gin.bind_parameter(_WORKDIR, str(workdir))
  for binding in gin_bindings:
    place = f"--gin_bindings '{config_errors.cut(binding)}'"
    with config_errors.rephrased(place, header):
      gin.parse_config(header + binding)
    for key, parsed in config_bindings.by_key(binding, header).items():
      where[key] = place
      _refuse_infinite(parsed, where[key])
    header += _import_statements(binding)
  if gin.query_parameter(_WORKDIR) != str(workdir):
    raise ValueError(
      'WORKDIR is the folder that --workdir names: use --workdir to set it, '
      'not a binding.'
    )
  bound = config_bindings.parse(gin.config_str())
  if messages := config_macros.check(bound):
    raise ValueError(' '.join(messages))
  for check in config_types.check, config_multiples.check:
    if messages := check(bound, where):
      raise ValueError(' '.join(messages))
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
      given = _shared_arguments(function, bindings_of, given) | given
      bound = function
    return bound(**given)
  except TypeError as error:
    message = config_errors.missing_argument(error)
    if message is None:
      raise
    raise ValueError(message) from error


def binding(function: Callable, name: str) -> Any:
  """The value that the recipe binds to a parameter; None if it binds none.

  No other parameter's value is computed.
  """
  try:
    bound = gin.get_bindings(function, resolve_references=False)
  except ValueError:  # It binds no parameter of the function.
    return None
  return copy.deepcopy(bound.get(name))  # Gin resolves references so.


def _shared_arguments(function, configured, given) -> dict[str, Any]:
  """Arguments of `configured` for parameters of `function`, not yet given."""
  _read_entirely.add(_full_name(configured))
  bindings = gin.get_bindings(configured)
  arguments = {}
  parameters = inspect.signature(configured).parameters
  names = inspect.signature(function).parameters.keys() & parameters
  for name in names - given.keys():
    default = parameters[name].default
    if name in bindings:
      arguments[name] = bindings[name]
    elif default is not inspect.Parameter.empty:
      arguments[name] = default
    else:
      raise ValueError(config_errors.not_given(configured.__name__, repr(name)))
  return arguments


def _full_name(function: Callable) -> str:
  """The name of a function in bindings."""
  return f'{function.__module__}.{function.__qualname__}'


def text() -> str:
  """All bindings, as the text of a gin file."""
  return gin.config_str()


def save(path: str | os.PathLike) -> None:
  """Writes all bindings to a gin file.

  A function that gin calls in a scope, such as the training of an initial
  policy, names the scope in the first line.
  """
  scope = gin.current_scope_str()
  first = f'{SCOPE} {scope}\n\n' if scope else ''
  whole_file.write_text(path, first + text())


def save_operative(path: str | os.PathLike) -> None:
  """Writes all parameters used so far, including defaults, to a gin file."""
  whole_file.write_text(path, gin.operative_config_str())


def refuse_unused(bindings_of: Callable | None = None) -> None:
  """Checks that every binding has an effect.

  Call it after the workflow has been traced: then every configured function
  has been called, or is an argument of a function that has. Or give the
  function that is going to be called.

  Args:
    bindings_of: a function all of whose bindings count as read.

  Raises:
    ValueError: if a binding has no effect; suggests the nearest name.
  """
  if bindings_of:
    _read_entirely.add(_full_name(bindings_of))
  names = unused()
  if not names:
    return
  names_read = _names_read()

  def message(name):
    if same := [x for x in names_read if x.endswith(f'.{name}')]:
      full = suggestions.join_names(same)
      return f'`{name}` is set but nothing reads it; write it in full: {full}.'
    candidates = [x for x in names_read if _same_kind(x, name)]
    if '.' in name:
      suggestion = suggestions.suggest(name, candidates)
    else:
      suggestion = suggestions.suggest(name, candidates, most=0)
      if suggestion == '.':
        suggestion = '. --help after the recipe lists its settings.'
    return f'`{name}` is set but nothing reads it{suggestion}'

  raise ValueError(' '.join(map(message, names)))


def unused() -> list[str]:
  """The left-hand sides of bindings that no call reads, now or later.

  A binding counts as read if a call has read it, or if its function or macro is
  referenced, as `@scope/name` or `%MACRO`, in the value of a binding that
  counts as read: such a function may be called later, or, when a run resumes,
  not at all.
  """
  bound = config_bindings.parse(gin.config_str())
  used = _used(bound, config_bindings.parse(gin.operative_config_str()))
  return [
    binding.name
    for (scope, selector), bindings in bound.items()
    for argument, binding in bindings.items()
    if (scope, selector, argument) not in used and binding.name != 'WORKDIR'
  ]


def _used(
  bound: config_bindings.Bindings, ran: config_bindings.Bindings
) -> set[tuple[str, str, str]]:
  """(scope, selector, argument) of every binding that counts as read."""
  used, visited = set(), set()
  # The scope of a call, its selector, the scope in which a function among its
  # arguments may be called, and the arguments it reads (None: all).
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
    for argument, (outer, binding) in config_bindings.visible(
      bound, scope, selector
    ).items():
      if arguments is not None and argument not in arguments:
        continue
      used.add((outer, selector, argument))
      for reference in binding.references:
        if reference.selector == config_bindings.MACRO:
          waiting.append((reference.scope, config_bindings.MACRO, holder, None))
        elif reference.scope or reference.evaluate:
          inner = reference.scope or scope
          waiting.append((inner, reference.selector, inner, None))
        else:
          # gin evaluates a macro in a scope named like the macro, but calls a
          # function that is the macro's value in the scope of its holder.
          for inner in (scope, holder):
            waiting.append((inner, reference.selector, inner, None))
  return used


def _names_read() -> list[str]:
  """The names of parameters and macros that are read, bound or not."""
  bound = config_bindings.parse(gin.config_str())
  ran = config_bindings.parse(gin.operative_config_str())
  names = {
    bound[scope, selector][argument].name
    for scope, selector, argument in _used(bound, ran)
  }
  names |= {x.name for arguments in ran.values() for x in arguments.values()}
  return sorted(names)


def _same_kind(name: str, other: str) -> bool:
  """Whether both are macros or both are parameters."""
  return ('.' in name) == ('.' in other)


@functools.cache
def _set_search() -> None:
  """Sets up where and how gin opens files."""
  gin.add_config_file_search_path(str(recipe_files.ROOT))
  # Leaves out gin's reader of package resources: it logs an error for every
  # folder without the file, and it fails if `gin_configs` can be imported (as a
  # namespace package), as it can where the package is installed.
  gin.config._FILE_READERS[:] = [(open, os.path.isfile)]


def _imports(parsed, where: dict[config_bindings.Key, str]) -> str:
  """The import statements of a parsed file, after those of its includes.

  Args:
    parsed: as gin returns it.
    where: where each binding stands, to which those of the file are added.
  """
  text = recipe_files.read(parsed.filename)
  header = ''.join(_imports(x, where) for x in parsed.includes)
  for key, binding in config_bindings.by_key(text, header).items():
    where[key] = f'{parsed.filename} line {binding.line}'
    _refuse_infinite(binding, where[key])
  return header + _import_statements(text)


def _refuse_infinite(binding: config_bindings.Binding, place: str) -> None:
  """Raises ValueError for 1e400, which gin reads and cannot write again."""
  for value in config_bindings.leaves(binding.value):
    if isinstance(value, float) and not math.isfinite(value):
      raise ValueError(
        f'{place}: `{binding.name}` is too large for a number: give at most '
        '1e308.'
      )


def _import_statements(text: str) -> str:
  """The import statements in a gin text, one a line."""
  return ''.join(
    f'{statement}\n'
    for statement, package, *_ in config_errors.IMPORT.findall(text)
    if package != '__gin__'
  )
