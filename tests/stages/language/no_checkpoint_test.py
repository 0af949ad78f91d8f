"""A model that is not there is answered with what to do."""

import pytest

from stages.language import huggingface, tokens
from stages.models.files import weights


def test_no_checkpoint_is_a_sentence(tmp_path):
  with pytest.raises(
    weights.CheckpointError, match='There is no checkpoint at'
  ):
    huggingface.load_config(tmp_path / 'nowhere')
  with pytest.raises(
    weights.CheckpointError, match='There is no checkpoint at'
  ):
    huggingface.policy(str(tmp_path), response_length=3)


def test_a_name_on_a_hub_is_answered_with_how_to_download_it():
  name = 'Qwen/Qwen2.5-0.5B'
  for load in huggingface.load_config, tokens.load_tokenizer:
    with pytest.raises(ValueError, match=f'no checkpoint .*hf download {name}'):
      load(name)


def test_a_file_in_gguf_is_answered_with_how_to_convert_it(tmp_path):
  file = tmp_path / 'model.gguf'
  file.touch()
  for load in huggingface.load_config, tokens.load_tokenizer:
    with pytest.raises(ValueError, match=f'no checkpoint .*gguf_model {file}'):
      load(str(file))
  with pytest.raises(ValueError, match=f'no checkpoint .*gguf_model {file}'):
    huggingface.load_config(tmp_path)  # Its folder.
