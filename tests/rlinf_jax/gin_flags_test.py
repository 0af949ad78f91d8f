import os
import sys

import pytest

import front_door
from rlinf_jax import gin_flags


@pytest.mark.parametrize(
  'value, text',
  [
    ('3', '3'),
    ('1e-6', '1e-6'),
    ('None', 'None'),
    ('True', 'True'),
    ('/models/a b', "'/models/a b'"),
    ('train.jsonl', "'train.jsonl'"),
    ("it's", '"it\'s"'),
    ('"quoted"', '"quoted"'),
    ('', "''"),
    ('@module.function()', '@module.function()'),
    ('%MACRO', '%MACRO'),
    ("{'a.jsonl': 3}", "{'a.jsonl': 3}"),
    ('{@a.b: @c}', '{@a.b: @c}'),
    ('{}', '{}'),
    ('{prompt}', "'{prompt}'"),
    ('{{}}', "'{{}}'"),
    ('{prompt} Answer: one number.', "'{prompt} Answer: one number.'"),
    ('[@a.b(), @c]', '[@a.b(), @c]'),
  ],
)
def test_what_is_no_literal_of_gin_is_a_string(value, text):
  assert gin_flags.literal(value) == text


INNER = """# Inner.
DEPTH = 3  # How deep.
# How wide.
WIDTH = 4
"""
OUTER = """# Trains a policy that reads two lines
# of comment; takes a minute.
#
# Details.

include 'inner.gin'

MODEL = %gin.REQUIRED  # A folder.
NAME = 'a # b'
WIDTH = 5

module.function:
  x = 1  # Not a macro.
"""


def test_macros_are_listed_with_their_comments(tmp_path, monkeypatch):
  (tmp_path / 'inner.gin').write_text(INNER)
  (tmp_path / 'outer.gin').write_text(OUTER)
  monkeypatch.chdir(tmp_path)
  assert gin_flags.macros(['outer.gin']) == [
    ('DEPTH', '3', 'How deep.'),
    ('WIDTH', '5', 'How wide.'),
    ('MODEL', '%gin.REQUIRED', 'A folder.'),
    ('NAME', "'a # b'", ''),
  ]
  text = gin_flags.describe(['outer.gin'])
  opening = 'Trains a policy that reads two lines of comment; takes a minute.'
  assert text.splitlines()[0] == f'outer.gin: {opening}'
  assert 'Details' not in text
  assert 'MODEL = required\n      A folder.' in text


def test_parameters_that_a_recipe_leaves_at_their_defaults_are_listed():
  text = gin_flags.describe_parameters(['gin_configs/grpo_math.gin'])
  one_line = ' '.join(text.split())
  assert one_line.startswith(
    'Defaults of workflows.grpo, each set by --gin.workflows.grpo.NAME=value '
    '(python -m pydoc stages.workflows.grpo explains them): clip_low=0.2 '
  )
  assert 'kl_estimator=@losses.kl_k3 ' in one_line
  assert 'Defaults of optimizers.adamw, ' in one_line
  assert ' clip_norm=1.0 ' in one_line
  assert 'Defaults of train.train, ' in one_line
  assert ' checkpoint_every=50 ' in one_line
  # The recipe binds these to its macros.
  for name in ('kl_coef', 'num_minibatches', 'group_size', 'evaluator', 'seed'):
    assert f' {name}=' not in one_line
  assert max(map(len, text.splitlines())) <= 80


def test_parameters_that_a_recipe_sets_without_a_macro_are_listed(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'base.gin').write_text(
    'train.train.workflow = @mine.grpo()\n'
    'train.train:\n  steps = %STEPS\n  evaluate_every = 100\n'
    'warm_up/train.train.seed = 3\n'
  )
  (tmp_path / 'own.gin').write_text(
    "include 'base.gin'\ntrain.train.evaluate_every = 50  # Often.\n"
  )
  text = gin_flags.describe_parameters(['own.gin'])
  assert text.endswith(
    'Set by the recipe, and changed by --gin.train.train.NAME=value:\n'
    '  evaluate_every=50'
  )


def test_of_a_workflow_that_is_not_ours_only_the_run_is_listed(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'own.gin').write_text('train.train.workflow = @mine.grpo()\n')
  text = gin_flags.describe_parameters(['own.gin'])
  assert text.startswith('Defaults of train.train, ')


def test_the_workflow_of_a_block_is_listed():
  text = gin_flags.describe_parameters(['gin_configs/ppo_push.gin'])
  assert text.startswith('Defaults of workflows.embodied_ppo, ')


RECIPE = ('--gin_file', 'gin_configs/grpo_math.gin')


@pytest.mark.parametrize(
  'how, args, code, message',
  [
    (front_door.run_process, ('--help',), 0, 'TRAIN = required'),
    (front_door.run, ('--gin_file=no.gin', '--help'), 1, 'There is no gin'),
    (front_door.run, ('--gin.MODEL', 'x'), 1, 'write --gin.NAME=value'),
    (
      front_door.run,
      ('--gin.MODEL=x', '--gin.TRAIN=y'),
      1,
      'add --gin.EVAL=',
    ),
  ],
)
def test_the_command_line_answers_in_a_sentence(how, args, code, message):
  done = how(*RECIPE, *args)
  assert done.returncode == code, done.stderr
  assert message in (done.stderr if code else done.stdout)
  assert 'Traceback' not in done.stderr


def test_help_whose_reader_has_left_ends_without_an_error(monkeypatch):
  read, write = os.pipe()
  os.close(read)  # As `head` does after its last line.
  with os.fdopen(write, 'w') as left:
    monkeypatch.setattr(sys, 'stdout', left)
    with pytest.raises(SystemExit) as ended:
      gin_flags.parse(['x', '--gin_file=gin_configs/grpo_math.gin', '--help'])
  assert not ended.value.code
