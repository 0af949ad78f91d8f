"""Syntax errors in gin files are answered by what to write instead."""

import inspect
import pathlib

import pytest

from rlinf_jax import train
from rlinf_jax.config import config, suggestions

ROOT = pathlib.Path(__file__).parents[2]
SUMS = 'gin_configs/grpo_arithmetic.gin'
BINDING = 'write `NAME = value` or `module.function.parameter = value`.'
SEVERAL = (
  'write a number, a string in quotes, `@module.function`, `%MACRO`, or '
  'several of them in brackets.'
)
PARAMETERS = inspect.signature(train.train).parameters
STATEMENT = "write `from package import module` or `include 'file.gin'`."

# Texts after `MODEL = `, each with its message.
VALUES = {
  '/models/qwen': '`/models/qwen` is not a value: write `MODEL = '
  '"/models/qwen"`.',
  'models/qwen': '`models/qwen` is not a value: write `MODEL = "models/qwen"`.',
  '~/m': '`~/m` is not a value: write `MODEL = "~/m"`.',
  './m': '`./m` is not a value: write `MODEL = "./m"`.',
  '../m': '`../m` is not a value: write `MODEL = "../m"`.',
  '/a b': '`/a b` is not a value: write `MODEL = "/a b"`.',
  's3://x/y': '`s3://x/y` is not a value: write `MODEL = "s3://x/y"`.',
  'qwen # it': '`qwen` is not a value: write `MODEL = "qwen"`.',
  'Qwen2.5-0.5B': '`Qwen2.5-0.5B` is not a value: write `MODEL = '
  '"Qwen2.5-0.5B"`.',
  'true': '`true` is not a value; did you mean `True`?',
  'false': '`false` is not a value; did you mean `False`?',
  'none': '`none` is not a value; did you mean `None`?',
  'null': '`null` is not a value; did you mean `None`?',
  'C:\\m': f'`C:\\m` is not a value: {SEVERAL}',
  '"/a': f'`"/a` is not a value: {SEVERAL}',
  "'x": f"`'x` is not a value: {SEVERAL}",
  '1/2': f'`1/2` is not a value: {SEVERAL}',
  '5 steps': f'`5 steps` is not a value: {SEVERAL}',
  '1,2': f'`1,2` is not a value: {SEVERAL}',
  '10k': f'`10k` is not a value: {SEVERAL}',
  '08': f'`08` is not a value: {SEVERAL}',
  '+5': f'`+5` is not a value: {SEVERAL}',
  '1 + 1': f'`1 + 1` is not a value: {SEVERAL}',
  '...': f'`...` is not a value: {SEVERAL}',
  'print(1)': f'`print(1)` is not a value: {SEVERAL}',
  '__import__("os")': f'`__import__("os")` is not a value: {SEVERAL}',
  '%a b': f'`%a b` is not a value: {SEVERAL}',
  '@/x': f'`@/x` is not a value: {SEVERAL}',
  ')': f'`)` is not a value: {SEVERAL}',
  '[a, b]': '`a` is not a value; put quotes around a string, `@` before a '
  'function and `%` before a macro.',
  '{a: 1}': '`a` is not a value; put quotes around a string, `@` before a '
  'function and `%` before a macro.',
  '': f'cannot be read: {BINDING}',
  '@': f'cannot be read: {BINDING}',
  '((((1': 'a bracket or a string is not closed (EOF in multi-line statement).',
  '"""x': 'a bracket or a string is not closed (EOF in multi-line string).',
  '1e400': '`MODEL` is too large for a number: give at most 1e308.',
  '[{1: -1e400}]': '`MODEL` is too large for a number: give at most 1e308.',
}

# Whole bindings, and the messages for them.
STATEMENTS = {
  'MODEL': f'cannot be read: {BINDING}',
  '= 5': f'cannot be read in `= 5`: {BINDING}',
  'MODEL == 5': f'cannot be read in `MODEL == 5`: {BINDING}',
  'MODEL := 5': f'cannot be read in `MODEL := 5`: {BINDING}',
  'MODEL: 5': f'cannot be read in `MODEL: 5`: {BINDING}',
  'MODEL..x = 5': f'cannot be read in `MODEL..x = 5`: {BINDING}',
  '.x = 5': f'cannot be read in `.x = 5`: {BINDING}',
  '1 = 5': f'cannot be read in `1 = 5`: {BINDING}',
  '/MODEL = 3': f'cannot be read in `/MODEL = 3`: {BINDING}',
  '@train.train.steps = 4': 'cannot be read in `@train.train.steps = 4`: '
  f'{BINDING}',
  '%STEPS = 4': f'cannot be read in `%STEPS = 4`: {BINDING}',
  'STEPS 5': f'cannot be read in `STEPS 5`: {BINDING}',
  'export STEPS=5': f'cannot be read in `export STEPS=5`: {BINDING}',
  '--STEPS=5': f'cannot be read in `--STEPS=5`: {BINDING}',
  'include /x': f'cannot be read in `include /x`: {STATEMENT}',
  'from . import x': f'cannot be read in `from . import x`: {STATEMENT}',
  'from __gin__ import x': 'cannot be read in `from __gin__ import x`: '
  f'{STATEMENT}',
  'import nosuch': 'there is no module `nosuch`: install it, or start the '
  'command in the folder that has it, or name that folder in PYTHONPATH.',
  'train.train.__init__ = 3': '`train.train` has no parameter `__init__`; '
  f'available: {suggestions.join_names(PARAMETERS)}.',
}


@pytest.mark.parametrize(
  ('binding', 'message'),
  [(f'MODEL = {value}', message) for value, message in VALUES.items()]
  + [*STATEMENTS.items()],
)
def test_what_is_not_gin_is_refused_in_one_sentence(
  binding, message, monkeypatch
):
  monkeypatch.chdir(ROOT)
  with pytest.raises(ValueError) as error:
    config.parse([SUMS], [binding], '/runs/x')
  assert str(error.value) == f"--gin_bindings '{binding}': {message}"
