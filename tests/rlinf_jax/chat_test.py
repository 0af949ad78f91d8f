"""A conversation with a model and adapters."""

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
