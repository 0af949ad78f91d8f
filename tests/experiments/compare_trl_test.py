"""Claims about the job on which our step is compared with TRL's."""

import json

import numpy as np
import transformers

from experiments.compare_trl import job


def test_both_sides_read_the_same_prompts(tmp_path):
  job.write(tmp_path, groups=3)
  tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
  prompt = job.prompts(3).prompt
  texts = json.loads((tmp_path / 'prompts.json').read_text())
  for text, token_P, mask_P in zip(
    texts, prompt.token, prompt.mask, strict=True
  ):
    np.testing.assert_array_equal(
      tokenizer(text)['input_ids'], token_P[mask_P > 0]
    )
  config = transformers.AutoConfig.from_pretrained(tmp_path)
  assert tokenizer.eos_token_id == config.eos_token_id == job.long_tail.STOP
