"""A model of `transformers` that vLLM and our own engine generate with."""

import sys
import types

import pytest

import claims


@pytest.fixture(
  scope='module', params=claims.some(['tied', 'untied'], keep=['tied'])
)
def case(request, tmp_path_factory):
  import vllm_models

  folder = tmp_path_factory.mktemp('model')
  sizes = vllm_models.SIZES | {'tie_word_embeddings': request.param == 'tied'}
  vllm_models.reference(sizes, 0).save_pretrained(folder)
  # Simulators have such placeholders in their modules.
  stand_in = vllm_models.Raising()
  sys.modules['raising'] = types.SimpleNamespace(stand_in=stand_in)
  yield vllm_models.Case(sizes, str(folder))
  del sys.modules['raising']
