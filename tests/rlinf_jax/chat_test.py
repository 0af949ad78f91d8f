"""A conversation with a model and adapters."""

import json
import shutil

import jax
import pytest

import own_data
from rlinf_jax import chat
from stages.language import huggingface
from stages.models import lora

LINES = ['one', 'two']


@pytest.fixture(scope='module')
def here(tmp_path_factory):
  """A folder of a model, an adapter of it, and the two as one model."""
  here = tmp_path_factory.mktemp('here')
  model = own_data.model(here / 'base')
  policy = huggingface.policy(model, response_length=4, lora=lora.Lora(rank=2))
  params = policy.init(jax.random.key(0))
  adapter = jax.tree.map(
    lambda x: jax.random.normal(jax.random.key(1), x.shape, x.dtype),
    params[lora.ADAPTER],
  )
  params |= {lora.ADAPTER: adapter}
  huggingface.export(here / 'adapter', params, model)
  huggingface.export(here / 'merged', params, model, merge_lora=True)
  return here, model


def answers(*folders):
  there = chat.Chat(*folders, length=6)
  return [*chat.converse(there, LINES, None, jax.random.key(0))]


def test_an_adapter_answers_as_the_merged_model(here):
  folder, model = here
  got = answers(model, str(folder / 'adapter'))
  assert got == answers(str(folder / 'merged'))
  assert got != answers(model)


def test_an_adapter_alone_is_refused_with_the_flag_that_takes_it(here):
  with pytest.raises(ValueError, match=r'give the folder .* --adapter'):
    chat.Chat(str(here[0] / 'adapter'), length=6)


def test_a_conversation_may_fill_the_positions_of_its_model(here, tmp_path):
  """And a line that does not fit into them leaves those before it."""
  model = shutil.copytree(here[1], tmp_path / 'short')
  config = json.loads((model / 'config.json').read_text())
  config['max_position_embeddings'] = 80
  (model / 'config.json').write_text(json.dumps(config))
  there = chat.Chat(str(model), length=6)
  lines = ['one', 'two' * 40, 'one']
  first, refused, again = chat.converse(there, lines, None, jax.random.key(0))
  assert '--length' in refused and 'reads at most 74' in refused
  assert '--length' not in first + again
  assert first == next(
    chat.converse(
      chat.Chat(here[1], length=6), ['one'], None, jax.random.key(0)
    )
  )
  with pytest.raises(ValueError, match='smaller --length, such as 40'):
    chat.Chat(str(model), length=80)
