"""Untrusted checkpoint folders load, or are refused in one sentence."""

import json
import os
import shutil

import jax
import numpy as np
import pytest
from safetensors import numpy as st

from stages.language import huggingface, language_model, tokens
from stages.models import adapters, lora, transformer
from stages.models.files import weights
from stages.models.layers import rope

KEY = jax.random.key(0)
# More tokens than the tokenizer has, as in published models.
CONFIG = transformer.Config(
  V=16,
  D=8,
  L=1,
  H=2,
  K=1,
  W=4,
  F=8,
  rope=rope.RopeConfig(),
  tie_embeddings=True,
)
END = '<|endoftext|>'


@pytest.fixture(scope='module')
def good(tmp_path_factory):
  """A small model with its tokenizer."""
  folder = tmp_path_factory.mktemp('good')
  tokenizer = tokens.train_tokenizer(folder, ['1+2=3 abc'], 40)
  assert len(tokenizer) == 13
  params = language_model.policy(CONFIG, response_length=1).init(KEY)
  huggingface.save(folder, params, CONFIG, eos_token_id=0)
  return folder


@pytest.fixture
def folder(good, tmp_path):
  tokens.load_tokenizer.cache_clear()
  return shutil.copytree(good, tmp_path / 'model')


def load(folder):
  return huggingface.policy(str(folder), response_length=2).init(KEY)


def refusal(folder):
  with pytest.raises(ValueError) as error:
    load(folder)
  message = str(error.value)
  assert str(folder) in message and message.endswith('.')
  assert len(message) < 700
  return message


def edit(name, *path, value=None, remove=False):
  """Returns `folder -> None`, which changes a file in JSON."""

  def change(folder):
    content = json.loads((folder / name).read_text())
    inner = content
    for key in path[:-1]:
      inner = inner[key]
    if remove:
      del inner[path[-1]]
    else:
      inner[path[-1]] = value
    (folder / name).write_text(json.dumps(content))

  return change


def write(name, content):
  return lambda folder: (folder / name).write_bytes(content.encode())


def replace(name, make):
  def change(folder):
    (folder / name).unlink(missing_ok=True)
    make(folder / name)

  return change


def remove(*names):
  return lambda folder: [(folder / name).unlink() for name in names]


def tensors(change):
  """Returns `folder -> None`, which changes the tensors of a model."""

  def changed(folder):
    file = folder / 'model.safetensors'
    st.save_file(change(st.load_file(file)), file)

  return changed


TOKENIZER, SETTINGS = 'tokenizer.json', 'tokenizer_config.json'
GENERATION, NORM = 'generation_config.json', 'model.norm.weight'
UNREADABLE = 'holds no tokenizer that transformers can read'
NO_END = 'its end token 16 is none of its 16 tokens from 0'
# The fault, the function that makes it, and words of the sentence.
HOSTILE = [
  ('no tokenizer', remove(TOKENIZER), 'has no tokenizer.json: copy it'),
  ('a tokenizer that is a folder', replace(TOKENIZER, os.mkdir), 'has no'),
  ('a tokenizer that is a pipe', replace(TOKENIZER, os.mkfifo), 'has no'),
  ('an empty tokenizer', write(TOKENIZER, ''), UNREADABLE),
  ('an empty object', write(TOKENIZER, '{}'), UNREADABLE),
  ('a list for a tokenizer', write(TOKENIZER, '[]'), UNREADABLE),
  ('a tokenizer of bytes', write(TOKENIZER, '\0\1'), UNREADABLE),
  ('a deep tokenizer', write(TOKENIZER, '[' * 10**5), UNREADABLE),
  ('half a tokenizer', write(TOKENIZER, '{"version": "1.0", "'), UNREADABLE),
  ('settings that are a list', write(SETTINGS, '[]'), UNREADABLE),
  ('settings that are a number', write(SETTINGS, '5'), UNREADABLE),
  ('settings cut short', write(SETTINGS, '{'), UNREADABLE),
  (
    'a class that is a number',
    edit(SETTINGS, 'tokenizer_class', value=5),
    UNREADABLE,
  ),
  (
    'an end token that is a number',
    edit(SETTINGS, 'eos_token', value=5),
    UNREADABLE,
  ),
  (
    'an unknown model',
    edit(TOKENIZER, 'model', 'type', value='Nope'),
    UNREADABLE,
  ),
  (
    'merges of unknown tokens',
    edit(TOKENIZER, 'model', 'merges', value=[['x', 'yy']]),
    UNREADABLE,
  ),
  (
    'a negative token',
    edit(TOKENIZER, 'model', 'vocab', 'a', value=-1),
    UNREADABLE,
  ),
  (
    'a token beyond the model',
    edit(TOKENIZER, 'model', 'vocab', 'a', value=10**6),
    'has a token 1000000, and the model has 16 tokens from 0',
  ),
  (
    'no tokens of text',
    edit(TOKENIZER, 'model', value={'type': 'BPE', 'vocab': {}, 'merges': []}),
    'has no tokens of text',
  ),
  (
    'an end token beyond the model',
    edit('config.json', 'eos_token_id', value=16),
    NO_END,
  ),
  ('another beyond it', write(GENERATION, '{"eos_token_id": [1, 16]}'), NO_END),
  (
    'an end token that is a text',
    write(GENERATION, '{"eos_token_id": "</s>"}'),
    "eos_token_id is '</s>', expected a whole number of at least 0",
  ),
  (
    'a generation that is a list',
    write(GENERATION, '[]'),
    'it is a list, expected an object',
  ),
  ('a generation cut short', write(GENERATION, '{'), 'is not JSON'),
  (
    'no configuration',
    remove('config.json'),
    'There is no checkpoint at',
  ),
  (
    'a configuration that is a pipe',
    replace('config.json', os.mkfifo),
    'There is no checkpoint at',
  ),
  (
    'another width of layers',
    edit('config.json', 'intermediate_size', value=9),
    'mlp.up_proj.weight is [8, 8], expected [9, 8]',
  ),
  ('no tensors', remove('model.safetensors'), 'holds neither'),
  (
    'tensors of torch',
    lambda folder: (folder / 'model.safetensors').rename(
      folder / 'pytorch_model.bin'
    ),
    'it holds pytorch_model.bin, which is of another format. Convert it',
  ),
  (
    'tensors of llama.cpp',
    lambda folder: (folder / 'model.safetensors').rename(folder / 'm.gguf'),
    'it holds m.gguf, which is of another format. Convert it',
  ),
  (
    'tensors that are a pipe',
    replace('model.safetensors', os.mkfifo),
    'holds neither',
  ),
  ('tensors of noise', write('model.safetensors', 'x' * 99), 'cannot be read'),
  (
    'an absurd header',
    lambda folder: (folder / 'model.safetensors').write_bytes(b'\xff' * 64),
    'cannot be read',
  ),
  (
    'whole numbers',
    tensors(lambda x: x | {NORM: np.ones(8, np.int32)}),
    f'{NORM} is of type I32',
  ),
  (
    'another shape',
    tensors(lambda x: x | {NORM: np.ones(9, np.float32)}),
    f'{NORM} is [9], expected [8]',
  ),
  (
    'a tensor too many',
    tensors(lambda x: x | {'evil': np.ones(9, np.float32)}),
    'extra evil',
  ),
  ('an index of nothing', write(weights.INDEX, '{}'), 'has no weight_map'),
  ('an index that is a list', write(weights.INDEX, '[]'), 'has no weight_map'),
  (
    'an index that leaves the folder',
    write(weights.INDEX, '{"weight_map": {"a": "../../etc/passwd"}}'),
    'do not trust this checkpoint',
  ),
  (
    'an index of numbers',
    write(weights.INDEX, '{"weight_map": {"a": 5}}'),
    'do not trust this checkpoint',
  ),
  (
    'an index of a pipe',
    lambda folder: (
      os.mkfifo(folder / 'pipe'),
      write(weights.INDEX, '{"weight_map": {"a": "pipe"}}')(folder),
    ),
    "lacks ['pipe']",
  ),
]


@pytest.mark.parametrize(
  ('spoil', 'words'),
  [x[1:] for x in HOSTILE],
  ids=[x[0] for x in HOSTILE],
)
def test_a_hostile_folder_is_refused_in_one_sentence(spoil, words, folder):
  spoil(folder)
  assert words in refusal(folder)


def test_a_weight_that_is_not_finite_is_named(folder):
  tensors(lambda x: x | {NORM: np.full(8, np.nan, np.float32)})(folder)
  with pytest.raises(
    weights.CheckpointError, match=f'{NORM} of .* has values that'
  ):
    load(folder)


HARMLESS = {
  'as it was made': lambda folder: None,
  'no settings of the tokenizer': remove(SETTINGS),
  'a negative longest text': edit(SETTINGS, 'model_max_length', value=-1),
  'a template cut short': edit(SETTINGS, 'chat_template', value='{{'),
  'a pipe that nothing reads': lambda folder: os.mkfifo(folder / 'README.md'),
  'a pipe for special tokens': lambda folder: os.mkfifo(
    folder / 'special_tokens_map.json'
  ),
}


@pytest.mark.parametrize('change', HARMLESS.values(), ids=HARMLESS)
def test_what_nothing_reads_does_no_harm(change, folder):
  change(folder)
  load(folder)


def test_code_in_a_folder_is_not_run(folder):
  code = "raise SystemExit('The code of a stranger ran.')"
  (folder / 'evil.py').write_text(code)
  for name, kind in (
    (SETTINGS, 'AutoTokenizer'),
    ('config.json', 'AutoConfig'),
  ):
    edit(name, 'auto_map', value={kind: ['evil.Evil', 'evil.Evil']})(folder)
  edit(SETTINGS, 'tokenizer_class', value='Evil')(folder)
  load(folder)


ADAPTERS = [
  (write(adapters.CONFIG, '[]'), 'it is not an object'),
  (write(adapters.CONFIG, '{'), 'is not JSON'),
  (write(adapters.CONFIG, '{}'), 'r is missing'),
  (edit(adapters.CONFIG, 'r', value='4'), "r is '4', expected 1 to 65536"),
  (edit(adapters.CONFIG, 'r', value=True), 'r is True, expected'),
  (edit(adapters.CONFIG, 'r', value=-1), 'r is -1, expected'),
  (edit(adapters.CONFIG, 'r', value=10**9), 'r is 1000000000, expected'),
  (
    edit(adapters.CONFIG, 'lora_alpha', value=float('nan')),
    'lora_alpha is nan, expected a number above 0',
  ),
  (edit(adapters.CONFIG, 'use_rslora', value='yes'), "use_rslora is 'yes'"),
  (edit(adapters.CONFIG, 'peft_type', value=['x']), "peft_type ['x']"),
  (replace(adapters.TENSORS, os.mkfifo), 'cannot be read (it is not there)'),
  (remove(adapters.TENSORS), 'cannot be read (it is not there)'),
  (write(adapters.TENSORS, 'x' * 99), 'cannot be read'),
]


@pytest.fixture(scope='module')
def adapter(good, tmp_path_factory):
  """The folder of an adapter of the model."""
  policy = huggingface.policy(
    str(good), response_length=2, lora=lora.Lora(rank=2)
  )
  folder = tmp_path_factory.mktemp('adapter') / 'it'
  huggingface.export(folder, policy.init(KEY), good)
  return folder


@pytest.mark.parametrize(('spoil', 'words'), ADAPTERS)
def test_a_hostile_adapter_is_refused(spoil, words, good, adapter, tmp_path):
  folder = shutil.copytree(adapter, tmp_path / 'adapter')
  spoil(folder)
  settings = lora.Lora(adapter=str(folder))
  with pytest.raises(weights.CheckpointError) as error:
    huggingface.policy(str(good), response_length=2, lora=settings).init(KEY)
  assert str(folder) in str(error.value) and words in str(error.value)


def test_an_adapter_that_is_not_finite_is_refused(good, adapter, tmp_path):
  folder = shutil.copytree(adapter, tmp_path / 'adapter')
  found = st.load_file(folder / adapters.TENSORS)
  found = {name: np.full_like(x, np.inf) for name, x in found.items()}
  st.save_file(found, folder / adapters.TENSORS)
  settings = lora.Lora(adapter=str(folder))
  policy = huggingface.policy(str(good), response_length=2, lora=settings)
  with pytest.raises(weights.CheckpointError, match='NaN or infinite'):
    policy.init(KEY)
