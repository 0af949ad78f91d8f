"""`--gin.NAME=value` and the macros of a recipe in --help, for absl programs.

--gin.MODEL=/models/qwen      for --gin_bindings 'MODEL = "/models/qwen"'
--gin.train.train.steps=50    for --gin_bindings 'train.train.steps = 50'
"""

import argparse
import ast
from collections.abc import Iterator, Sequence
import contextlib
import inspect
import io
import re
import sys
import textwrap
import tokenize
from typing import NamedTuple

from absl import flags

from rlinf_jax import command_line
from rlinf_jax.config import recipe_files

# Not a template that begins with a field, such as '{prompt} Think first.'
DICT = re.compile(r'\{(?:\s*|.*:.*)\}\s*', re.DOTALL)
PREFIX = re.compile(r'--?gin\.(.*)', re.S)
NAME = re.compile(r'[\w./]+')
MACRO = re.compile(r'([A-Za-z_]\w*)\s*=\s*(.*)')
WORKFLOW = re.compile(
  r'^(?:train\.train\.|[ \t]+)workflow *= *@(workflows)\.(\w+)\(\)', re.M
)
OPTIMIZER = re.compile(r'= *@(?:\w+/)*(optimizers)\.(\w+)\(\)')
INDENTED = {
  'initial_indent': '  ',
  'subsequent_indent': '  ',
  'break_long_words': False,
  'break_on_hyphens': False,
}
HELP = ('--help', '-help', '--helpshort', '-h')


class Macro(NamedTuple):
  """A macro of a recipe.

  Attributes:
    name: its name.
    value: the text of its value, of one line.
    comment: the comment behind it, or the line above; '' without either.
  """

  name: str
  value: str
  comment: str


def parse(argv: Sequence[str]) -> list[str]:
  """Parses the flags of a program; for `app.run(flags_parser=parse)`.

  Returns:
    The name of the program. Other arguments than flags are refused.
  """
  # Help is asked for before required macros are given.
  try:
    if any(arg in HELP for arg in argv) and (files := _gin_files(argv)):
      for file in files:
        recipe_files.check(file)
      other = 'Other flags, of every recipe: --help without --gin_file.'
      texts = describe(files), describe_parameters(files), other
      with command_line.reader_may_leave():
        print(*texts, sep='\n\n', flush=True)
      sys.exit()
    words = [argv[0], *map(as_binding, argv[1:])]
    _, *rest = command_line.parse_flags(words)
    if rest:
      raise ValueError(
        f'{rest[0]!r:.200} is no flag: write --gin.NAME=value for a setting, '
        '--gin_file for a recipe.'
      )
  except flags.Error as error:
    command_line.refuse(command_line.of_flags(error))
  except (ValueError, OSError) as error:
    command_line.refuse(str(error))
  return [argv[0]]


def as_binding(arg: str) -> str:
  """An argument, with `--gin.NAME=value` turned into --gin_bindings."""
  match = PREFIX.fullmatch(arg)
  if not match:
    return arg
  name, equals, value = match[1].partition('=')
  if not equals or not NAME.fullmatch(name):
    raise ValueError(
      f'{arg} is not a setting: write --gin.NAME=value, without spaces around '
      'the equals sign.'
    )
  return f'--gin_bindings={name} = {literal(value)}'


def literal(value: str) -> str:
  """A value in the syntax of gin: what is no literal in it is a string."""
  # References, or lists that may hold some: gin reports what is wrong there.
  if value.startswith(('@', '%', '[', '(')) or DICT.fullmatch(value):
    return value
  try:
    ast.literal_eval(value)
  except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
    return repr(value)
  return value


def describe(files: Sequence[str]) -> str:
  """A text that lists the macros of recipes, each with its comment.

  Raises:
    FileNotFoundError: if there is no such recipe.
  """
  title = f'{files[-1]}: {_opening(recipe_files.read(files[-1]))}'
  rows = [
    textwrap.fill(title, 80, break_long_words=False, break_on_hyphens=False),
    '',
    'Settings, each by --gin.NAME=value, with its value in the recipe:',
  ]
  for macro in macros(files):
    required = macro.value.startswith('%gin.REQUIRED')
    value = 'required' if required else textwrap.shorten(macro.value, 60)
    rows.append(f'  {macro.name} = {value}')
    if macro.comment:
      rows.append(f'      {macro.comment}')
  return '\n'.join(rows)


def describe_parameters(files: Sequence[str]) -> str:
  """A text that lists parameters which no macro sets, with their values.

  A recipe leaves them at their defaults, or sets them itself. They are those of
  `train`, and of the workflow and the optimizers that recipes name, if these
  are of `stages`.
  """
  # Imported here: --help of another program needs no workflow.
  from rlinf_jax import train
  from stages import workflows
  from stages.learn import optimizers

  text = '\n'.join(map(recipe_files.with_includes, files))
  modules = {'workflows': workflows, 'optimizers': optimizers}
  names = [
    *WORKFLOW.findall(text)[-1:],
    *dict.fromkeys(OPTIMIZER.findall(text)),
  ]
  functions = {
    f'{module}.{name}': getattr(modules[module], name, None)
    for module, name in names
  }
  lines = []
  for name, function in (functions | {'train.train': train.train}).items():
    if function is None:
      continue
    bound = _bound(text, name)
    defaults = [
      f'{x.name}={_shown(x.default)}'
      for x in inspect.signature(function).parameters.values()
      if x.default is not x.empty and x.name not in {*bound, 'resume'}
    ]
    values = [f'{x}={y}' for x, y in bound.items() if _is_literal(y)]
    if defaults:
      lines += [
        f'Defaults of {name}, each set by --gin.{name}.NAME=value',
        f'(python -m pydoc {function.__module__} explains them):',
        *textwrap.wrap(' '.join(defaults), 80, **INDENTED),
      ]
    if values:
      lines += [
        f'Set by the recipe, and changed by --gin.{name}.NAME=value:',
        *textwrap.wrap(' '.join(values), 80, **INDENTED),
      ]
  return '\n'.join(lines)


def _bound(text: str, function: str) -> dict[str, str]:
  """The parameters of a function that a gin text binds, with their values.

  A value is the text of its first line, without a comment; of several values,
  the last one.
  """
  bound, block = {}, False
  for line in text.splitlines():
    if line and not line[0].isspace():
      block = line.startswith(f'{function}:')
    prefix = r'\s+' if block else rf'{re.escape(function)}\.'
    if match := re.match(rf'{prefix}(\w+) *= *(.*)', line):
      bound[match[1]] = match[2].partition(' #')[0].strip()
  return bound


def _is_literal(value: str) -> bool:
  """Whether a text is the whole of a value, and neither macro nor reference."""
  try:
    ast.literal_eval(value)
  except (SyntaxError, ValueError):
    return False
  return True


def _shown(default) -> str:
  """A default as gin writes it."""
  if callable(default):
    return f'@{default.__module__.rpartition(".")[2]}.{default.__name__}'
  return repr(default)


def _opening(text: str) -> str:
  """The first paragraph of the comment that opens a recipe, on one line."""
  words = []
  for line in text.splitlines():
    if not line.startswith('#') or not line.lstrip('# '):
      break
    words.append(line.lstrip('# '))
  return ' '.join(words)


def macros(files: Sequence[str]) -> list[Macro]:
  """The macros that files and their includes set; later values are kept."""
  found = {}
  for file in files:
    for macro in _macros(recipe_files.read(file)):
      comment = macro.comment or found.get(macro.name, macro).comment
      found[macro.name] = macro._replace(comment=comment)
  return list(found.values())


def _macros(text: str) -> Iterator[Macro]:
  """The macros of a gin text in its order, those of its includes there."""
  lines, comments = text.splitlines(), _comments(text)
  for i, line in enumerate(lines):
    if include := recipe_files.INCLUDE.match(line):
      yield from _macros(recipe_files.read(include[1]))
    elif macro := MACRO.match(line):
      above = comments.get(i - 1)
      if i in comments:
        column, comment = comments[i]
        line = line[:column]
      elif above and above[0] == 0:
        comment = above[1]
      else:
        comment = ''
      value = MACRO.match(line)[2].strip()
      yield Macro(macro[1], value, comment)


def _comments(text: str) -> dict[int, tuple[int, str]]:
  """The column and the words of the comments of a gin text, by line."""
  comments = {}
  # `config.parse` reports text that is not gin.
  with contextlib.suppress(tokenize.TokenError, SyntaxError):
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
      if token.type == tokenize.COMMENT:
        row, column = token.start
        comments[row - 1] = column, token.string.lstrip('# ')
  return comments


def _gin_files(argv: Sequence[str]) -> list[str]:
  """The values of --gin_file, before flags are parsed."""
  parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
  parser.add_argument('--gin_file', action='append', default=[])
  known, _ = parser.parse_known_args(argv[1:])
  return known.gin_file
