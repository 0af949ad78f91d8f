"""Errors of gin become one clear sentence."""

import subprocess
import sys

import pytest

from fake_recipe import BASE, parse, refused, run, write
from rlinf_jax.config import recipe_files

pytestmark = pytest.mark.usefixtures('recipe_folder')


def test_a_missing_file_is_reported_with_the_searched_folders(recipe_folder):
  with pytest.raises(FileNotFoundError) as error:
    parse(files=['bsae.gin'])
  text = str(error.value)
  assert str(recipe_folder) in text and str(recipe_files.ROOT) in text
  assert text.endswith('did you mean `base.gin`?')


def test_a_missing_absolute_path_is_reported(recipe_folder):
  with pytest.raises(FileNotFoundError) as error:
    parse(files=[str(recipe_folder / 'configs/none.gin')])
  assert f'(searched in {recipe_folder}/configs)' in str(error.value)


def test_a_missing_include_is_reported_with_its_file():
  write('top.gin', "\ninclude 'bsae.gin'")
  with pytest.raises(FileNotFoundError) as error:
    parse(files=['top.gin'])
  text = str(error.value)
  assert text.startswith('top.gin line 2: There is no gin file bsae.gin')
  assert text.endswith('did you mean `base.gin`?')


def test_gin_logs_nothing_while_it_searches(recipe_folder):
  write('top.gin', "include 'nowhere/none.gin'")
  code = (
    'from rlinf_jax.config import config\n'
    'try: config.parse(["top.gin"], [], "x")\n'
    'except FileNotFoundError as error: print(error)'
  )
  result = subprocess.run(
    [sys.executable, '-c', code],
    env={'PYTHONPATH': str(recipe_files.ROOT)},
    capture_output=True,
    text=True,
  )
  assert result.stdout.startswith('top.gin line 1: There is no gin file')
  assert result.stderr == ''


@pytest.mark.parametrize(
  ('binding', 'message'),
  [
    (
      'flwos.grpo.clip_high = 1',
      '`flwos` is not imported; did you mean `flows`?',
    ),
    (
      'grpo.clip_high = 1',
      '`grpo` is not imported; did you mean `flows.grpo`?',
    ),
    (
      'flows.gpro.clip_high = 1',
      'there is no `flows.gpro`; did you mean `flows.grpo`?',
    ),
    (
      'loop.train.workflow = @flows.gpro()',
      'there is no `flows.gpro`; did you mean `flows.grpo`?',
    ),
    (
      'loop.train.workflow = @warm/flows.gpro()',
      'there is no `flows.gpro`; did you mean `flows.grpo`?',
    ),
    (
      'flows.grpo.clip_hihg = 1',
      '`flows.grpo` has no parameter `clip_hihg`; did you mean `clip_high`?',
    ),
    (
      'flows.sft.clip = 1',
      '`flows.sft` has no parameter `clip`; available: `optimizer`, '
      '`examples`.',
    ),
    (
      'from recipe_library import flwos',
      'there is no module `recipe_library.flwos`; did you mean '
      '`recipe_library.flows`?',
    ),
    (
      'flows.grpo.clip_high = ',
      'cannot be read: write `NAME = value` or `module.function.parameter = '
      'value`.',
    ),
    (
      'flows.grpo.clip_high 3',
      'cannot be read in `flows.grpo.clip_high 3`: write `NAME = value` or '
      '`module.function.parameter = value`.',
    ),
    (
      'flows.grpo.clip_high = [1,',
      'a bracket or a string is not closed (EOF in multi-line statement).',
    ),
    (
      'flows.grpo.loss = token_mean',
      '`token_mean` is not a value: write `flows.grpo.loss = "token_mean"`.',
    ),
    (
      'flows.grpo = 1',
      'a name is too short: on the left, it should name a parameter of a '
      'function (`module.function.parameter = value`) or a macro (`NAME = '
      'value`), and behind `@`, a function of a module (`@module.function`).',
    ),
  ],
)
def test_an_unreadable_binding_is_one_sentence(binding, message):
  assert refused(binding) == f"--gin_bindings '{binding}': {message}"


def test_an_error_in_a_file_names_the_line():
  write('top.gin', BASE + '\n  flows.grpo.clip_hihg = 1\n')
  assert refused(files=['top.gin']) == (
    'top.gin line 15: `flows.grpo` has no parameter `clip_hihg`; did you mean '
    '`clip_high`?'
  )


def test_a_parameter_is_suggested_where_an_include_imports_its_function():
  write('base.gin', BASE)
  write('top.gin', "include 'base.gin'\nflows.grpo.clip_hihg = 1\n")
  assert refused(files=['top.gin']) == (
    'top.gin line 2: `flows.grpo` has no parameter `clip_hihg`; did you mean '
    '`clip_high`?'
  )


def test_an_error_in_an_include_names_the_line_of_the_include():
  write('top.gin', "include 'base.gin'\ninclude 'inner.gin'")
  write('inner.gin', '\nSTEPS == 3')
  assert refused(files=['top.gin']).startswith('inner.gin line 2: ')


def test_a_file_without_dynamic_registration_is_explained():
  write('top.gin', 'from recipe_library import flows\nflows.none.clip_high = 1')
  assert 'from __gin__ import dynamic_registration' in refused(
    files=['top.gin']
  )


def test_an_error_in_an_imported_module_is_not_rephrased():
  with pytest.raises(NameError, match='undefined_name'):
    parse('from recipe_library import broken')
  with pytest.raises(SyntaxError, match='was never closed'):
    parse('from recipe_library import unfinished')


def test_a_missing_argument_is_one_sentence():
  write('small.gin', BASE.replace('  flows.grpo.group_size = 4\n', ''))
  parse(files=['small.gin'])
  with pytest.raises(ValueError) as error:
    run()
  assert str(error.value) == (
    "`grpo` is not given 'group_size'; bind it in the recipe or with "
    '--gin_bindings.'
  )


def test_a_call_with_too_few_arguments_inside_the_code_stays_a_type_error():
  parse(
    'from recipe_library import clumsy',
    'flows.grpo.loss = @clumsy.train()',
  )
  with pytest.raises(TypeError, match='area'):
    run()
