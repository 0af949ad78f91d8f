"""Programs beside `rlinf_jax.main` answer wrong input with one sentence."""

import io
import json
import pathlib
import shutil
import sys
import time
import types

from absl.testing import flagsaver
import jax
import pytest

from rlinf_jax import chat, command_line
from rlinf_jax.data import chat_template
from rlinf_jax.prepare import (
  gguf_model,
  openpi_model,
  tiny_text,
  tiny_vision,
  tiny_vla,
)
from rlinf_jax.report import report
from rlinf_jax.serve import __main__ as serve
import served_models
from stages.language import tokens

# Programs with flags: their functions, and the operands of their command lines.
PROGRAMS = {
  'chat': (chat.main, 'MODEL'),
  'serve': (serve.main, 'MODEL'),
  'gguf_model': (gguf_model.main, 'MODEL', 'FOLDER'),
  'openpi_model': (openpi_model.main, 'FOLDER', 'NEW_FOLDER'),
  'tiny_text': (tiny_text.main,),
  'tiny_vla': (tiny_vla.main,),
  'tiny_vision': (tiny_vision.main,),
}
TEMPLATES = {
  'broken': '{% for m in messages %}{{ m.role ',
  'raises': '{{ raise_exception("no user") }}',
  'absent': '{{ messages[5].role.text }}',
  'hostile': '{{ messages.__class__.__mro__ }}',
  'recurses': '{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}',
  'divides': '{{ 1 / 0 }}',
  'fills': "{{ 'x' * 10**8 }}",
  'loops': (
    '{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}'
    '{% endfor %}'
  ),
  'turns': 'x',
}
REFUSES = 'The chat template of {here}/%s refuses '
METRICS = '{"step": 1, "loss": 1.0}\n'
# Folders of runs, with what their files hold.
RUNS = {
  'good': {'config.gin': b'\xff\xfe'},
  'step': {'metrics.jsonl': b'{"loss": 1.0}\n{"step": 2}\n'},
  'text': {'metrics.jsonl': b'{"step": 1, "loss": "x"}\n{"step": 2}\n'},
  'list': {'metrics.jsonl': b'[1]\n{"step": 2}\n'},
  'bytes': {'metrics.jsonl': b'\xff\xfe\x00\n\xff'},
  'spans': {'timeline.jsonl': b'{"step": 1}\n{"step": 1}\n'},
  'span': {
    'timeline.jsonl': b'{"step": 1, "place": "a", "what": "run", "stage": "b",'
    b' "start": "x", "end": 1}\n'
  },
  'samples': {'samples.jsonl': b'{"step": 1, "split": "eval"}\n'},
  'notices': {'notices.jsonl': b'{"step": 1}\n'},
  'predictions': {
    'predictions.jsonl': b'{"step": 1, "seconds": 1}\n',
    'metrics.jsonl': b'{"step": 1, "time/step": 1, "time/a": 1}\n',
  },
  'result': {'result.json': b'[1]'},
  'evaluation': {'evaluation.json': b'{"sets": 3, "seconds": 1}'},
  'set': {'evaluation.json': b'{"sets": {"a": [1]}, "seconds": 1}'},
  'score': {'evaluation.json': b'{"sets": {"a": {"b": {}}}, "seconds": 1}'},
  'value': {
    'evaluation.json': b'{"sets": {"a": {"b": {"value": "x"}}}, "seconds": 1}'
  },
}
# A program, its arguments, and the beginning of the only line of error; {here}
# is a folder of models, runs and files.
WRONG = [
  ('chat', [], 'Usage: python -m rlinf_jax.chat [--flags] MODEL'),
  ('chat', [''], 'Usage: python -m rlinf_jax.chat'),
  ('chat', ['{here}/model', 'b'], 'Usage: python -m rlinf_jax.chat'),
  ('chat', ['/none'], 'There is no checkpoint at /none'),
  ('chat', ['{here}/file'], 'There is no checkpoint at {here}/file'),
  ('chat', ['x', '--length=0'], 'flag --length=0: '),
  ('chat', ['x', '--length=999999999'], 'flag --length=999999999: '),
  ('chat', ['x', '--temperature=hot'], 'flag --temperature=hot: '),
  (
    'chat',
    ['x', '--temperature=nan'],
    'flag --temperature=nan: It must be a number. --h',
  ),
  ('chat', ['x', '--temperature=-1'], 'flag --temperature=-1: '),
  ('chat', ['x', '--seed=-1'], 'flag --seed=-1: '),
  ('chat', ['x', f'--seed={10**30}'], 'flag --seed=1000'),
  (
    'chat',
    ['x', '--lenght=3'],
    'There is no flag --lenght; did you mean --len',
  ),
  *(
    ('chat', [f'{{here}}/{name}'], REFUSES % name)
    for name in TEMPLATES
    if name != 'turns'
  ),
  *(
    ('serve', [f'{{here}}/{name}', '--port=0'], REFUSES % name)
    for name in TEMPLATES
    if name not in ('turns', 'fills', 'loops')
  ),
  (
    'serve',
    ['{here}/turns', '--port=0'],
    'The chat template of {here}/turns does not end a turn of the assistant',
  ),
  ('serve', [], 'Usage: python -m rlinf_jax.serve [--flags] MODEL'),
  ('serve', ['/none', '--port=0'], 'There is no checkpoint at /none'),
  ('serve', ['x', '--port=99999'], 'flag --port=99999: '),
  ('serve', ['x', '--port=http'], 'flag --port=http: '),
  ('serve', ['x', '--port=0', '--host='], 'The host is empty: give an address'),
  (
    'serve',
    ['x', '--port=0', '--host=8.8.8.8'],
    'The endpoint cannot listen on port 0 of 8.8.8.8 (Cannot assign',
  ),
  (
    'serve',
    ['x', '--port=0', '--host=no such host'],
    'The endpoint cannot listen on port 0 of no such host (',
  ),
  ('serve', ['x', '--response_length=0'], 'flag --response_length=0: '),
  ('serve', ['x', '--prompt_length=5'], 'flag --prompt_length=5: '),
  ('serve', ['x', f'--prompt_length={10**9}'], 'flag --prompt_length=1000'),
  ('serve', ['x', '--tool_format=json'], 'flag --tool_format=json: '),
  ('gguf_model', ['{here}/file'], 'Usage: python -m rlinf_jax.prepare.gguf_mo'),
  ('gguf_model', ['', ''], 'Usage: python -m rlinf_jax.prepare.gguf_model'),
  ('gguf_model', ['/none', '{here}/new'], 'There is no file /none.'),
  ('gguf_model', ['{here}', '{here}/new'], '{here} is a folder: name the'),
  ('gguf_model', ['no_such', '{here}/new'], 'The package no_such is not insta'),
  ('gguf_model', ['os', '{here}/new'], 'The package os has 0 GGUF files'),
  ('gguf_model', ['{here}/file', '{here}/new'], '{here}/file cannot be read'),
  ('gguf_model', ['{here}/empty', '{here}/new'], '{here}/empty cannot be read'),
  ('gguf_model', ['{here}/large', '{here}/new'], '{here}/large cannot be read'),
  ('tiny_vla', ['x', '--out={here}/new'], 'Usage: python -m rlinf_jax.prepare'),
  ('tiny_vla', ['--episodes=0', '--out={here}/new'], 'flag --episodes=0: '),
  ('tiny_vla', ['--episodes=x', '--out={here}/new'], 'flag --episodes=x: '),
  ('tiny_vla', ['--out={here}'], '{here} exists: let --out name a new one.'),
  ('tiny_vla', ['--out={here}/file'], '{here}/file exists: let --out name'),
  ('tiny_vla', ['--out=/dev/null/x'], '/dev/null/x cannot be used (Not a dir'),
  ('tiny_vla', ['--out=/proc/x'], '/proc/x cannot be used (No such file'),
  ('tiny_text', ['x', '--out={here}/new'], 'Usage: python -m rlinf_jax.prepar'),
  ('tiny_text', ['--out={here}'], '{here} exists: let --out name a new one.'),
  ('tiny_vision', ['--rows=0', '--out={here}/new'], 'flag --rows=0: '),
  ('tiny_vision', ['--held_out=x', '--out={here}/new'], 'flag --held_out=x: '),
  ('tiny_vision', ['--out={here}'], '{here} exists: let --out name a new one.'),
  ('openpi_model', ['{here}/file'], 'Usage: python -m rlinf_jax.prepare.openp'),
  ('openpi_model', ['/none', '{here}/new'], "/none has no folder 'params'"),
  ('report', ['/none'], '/none has no metrics to report'),
  ('report', ['{here}/file'], '{here}/file is a file, and reports are of run'),
  ('report', ['{here}/good', '{here}/file'], '{here}/file is a file, and rep'),
  ('report', ['{here}/good', '{here}/good'], '{here}/good is given twice'),
  ('report', ['{here}/good'] * 9, '9 runs cannot be told apart by 8 colors'),
  (
    'report',
    ['{here}/good', '{here}/second', '--output=/none/x.html'],
    '/none/x.html cannot be used (No such file',
  ),
  (
    'report',
    ['{here}/good', '{here}/second', '--output={here}'],
    '{here} cannot be used (Is a directory)',
  ),
  *(
    ('report', [f'{{here}}/{name}'], f'{{here}}/{name}/{[*files][0]}')
    for name, files in RUNS.items()
    if name not in ('good', 'bytes')
  ),
  *(
    ('report', ['{here}/good', f'{{here}}/{name}'], f'{{here}}/{name}')
    for name in ('step', 'bytes', 'spans', 'evaluation')
  ),
]


@pytest.fixture(scope='module')
def here(tmp_path_factory):
  here = tmp_path_factory.mktemp('here')
  model = shutil.copytree(served_models.model(here / 'own'), here / 'model')
  for name, template in TEMPLATES.items():
    folder = shutil.copytree(model, here / name)
    (folder / 'chat_template.jinja').write_text(template)
  for name, files in ({'second': {}} | RUNS).items():
    (here / name).mkdir()
    for file, content in ({'metrics.jsonl': METRICS.encode()} | files).items():
      (here / name / file).write_bytes(content)
  (here / 'file').write_bytes(b'x' * 100)
  (here / 'empty').write_bytes(b'')
  (here / 'large').write_bytes(b'GGUF\3\0\0\0' + b'\xff' * 60)
  return here


def end(program, arguments, monkeypatch, capsys):
  """Runs a program; returns its exit code, output and errors."""
  monkeypatch.setattr(sys, 'argv', [program, *arguments])
  monkeypatch.setattr(sys, 'stdin', io.StringIO('hello\n\n'))
  code = 0
  try:
    if program == 'report':
      report.main()
    else:
      with flagsaver.flagsaver():
        command_line.run(*PROGRAMS[program])
  except SystemExit as error:
    code = error.code or 0
  return code, *capsys.readouterr()


@pytest.mark.parametrize(
  ('program', 'arguments', 'line'),
  WRONG,
  ids=[f'{program} {" ".join(words)}'[:80] for program, words, _ in WRONG],
)
def test_wrong_input_gets_one_sentence_soon(
  program, arguments, line, here, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(chat_template, 'SECONDS', 2.0)
  before, start = sorted(here.rglob('*')), time.process_time()
  words = [x.replace('{here}', str(here)) for x in arguments]
  code, out, errors = end(program, words, monkeypatch, capsys)
  assert (code, out) == (1, ''), errors
  (only,) = errors.strip().split('\n')
  assert only.startswith(line.replace('{here}', str(here)))
  assert (
    only.endswith(('.', 'MODEL', 'FOLDER', '[--flags]')) and len(only) < 600
  )
  assert sorted(here.rglob('*')) == before and not list(tmp_path.iterdir())
  assert time.process_time() - start < 10


@pytest.mark.parametrize('text', ['\udcff', 'x\ud800'])
def test_a_conversation_that_is_not_unicode_is_refused(text, here):
  tokenizer = tokens.load_tokenizer(str(here / 'model'))
  messages = [{'role': 'user', 'content': text}]
  with pytest.raises(ValueError, match='refuses them: .* is not Unicode'):
    chat_template.render(tokenizer, messages, 'them')


def test_a_run_whose_recipe_is_damaged_is_still_reported(
  here, tmp_path, monkeypatch, capsys
):
  folders = [
    shutil.copytree(here / x, tmp_path / x) for x in ('good', 'second')
  ]
  for arguments in (folders[:1], [*folders, f'--output={tmp_path}/c.html']):
    words = [*map(str, arguments)]
    code, out, errors = end('report', words, monkeypatch, capsys)
    assert (code, errors) == (0, '')
    assert pathlib.Path(out.strip()).read_text().startswith('<!')


def test_a_model_that_answers_is_not_refused(here, monkeypatch, capsys):
  words = [str(here / 'model'), '--length=2']
  code, out, errors = end('chat', words, monkeypatch, capsys)
  assert (code, errors) == (0, '') and out.strip()


def test_a_chat_says_which_characters_the_tokenizer_lacks(tmp_path):
  heard = []

  def answer(messages, key):
    del key
    heard.append(messages[-1]['content'])
    return 'a'

  tokenizer = tokens.train_tokenizer(str(tmp_path / 'own'), ['ab'], 8)
  there = types.SimpleNamespace(tokenizer=tokenizer, answer=answer)
  lines = ['b?\n', 'b\n']
  said = [*chat.converse(there, lines, None, jax.random.key(0))]
  assert "cannot encode ['?']" in said[0]
  assert said[1] == 'a' and heard == ['b']


def test_a_config_that_transformers_refuses_is_among_what_to_copy(
  here, tmp_path, monkeypatch, capsys
):
  model = shutil.copytree(here / 'model', tmp_path / 'model')
  config = json.loads((model / 'config.json').read_text())
  config |= {'num_hidden_layers': 10**9, 'layer_types': ['full_attention']}
  (model / 'config.json').write_text(json.dumps(config))
  code, out, errors = end('chat', [str(model)], monkeypatch, capsys)
  assert (code, out) == (1, '')
  assert 'layers' in errors and 'copy its config.json' in errors
