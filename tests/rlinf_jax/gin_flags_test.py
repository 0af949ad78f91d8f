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
