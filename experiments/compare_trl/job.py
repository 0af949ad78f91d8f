"""The job on which our step is compared with TRL's: a model and its prompts.

  python -m experiments.compare_trl.job runs/compare_trl

The folder is what `trl_step.py` reads: the model in Hugging Face's layout, a
tokenizer of words from t0 to t2047, and `prompts.json`.
"""

import json
import pathlib
import sys

import jax
import numpy as np

from experiments.generation import long_tail
from stages import base
from stages.language import language_model

CONFIG = long_tail.SIZES['3.5M']
MEDIAN = 12  # Tokens of a completion; the 95th percentile is eight times it.
LENGTH = 256  # The most tokens of a completion.
PROMPT = 32  # The most tokens of a prompt; the fewest are half of it.


def init(key: base.Key) -> base.Params:
  """Parameters whose completions have a long tail of lengths."""
  del key  # Both sides have the same.
  return long_tail.params(CONFIG, MEDIAN)


def policy(slots: int, packed_tokens: int) -> base.Policy:
  """Our policy: continuous batching, and packed rows in training."""
  return language_model.policy(
    CONFIG,
    response_length=LENGTH,
    stop=(long_tail.STOP,),
    init=init,
    slots=slots,
    packed_tokens=packed_tokens,
  )


def prompts(groups: int) -> base.Problem:
  """Prompts of random lengths, without an answer."""
  rng = np.random.default_rng(2)
  full = long_tail.prompts(CONFIG, groups, 1, PROMPT)
  length_N1 = rng.integers(PROMPT // 2, PROMPT + 1, (groups, 1))
  mask_NP = (np.arange(PROMPT) >= PROMPT - length_N1).astype(np.int32)
  token_NP = np.asarray(full.token) * mask_NP
  return base.Problem(base.Prompt(token_NP, mask_NP), np.zeros(groups, int))


def write(folder: pathlib.Path, groups: int) -> None:
  """Writes the model, its tokenizer and the prompts."""
  # Imported here: a step of ours is measured without what it does not need.
  import tokenizers
  import transformers

  from stages.language import huggingface

  folder.mkdir(parents=True, exist_ok=True)
  huggingface.save(
    folder, init(jax.random.key(0)), CONFIG, eos_token_id=long_tail.STOP
  )
  # Letters before numbers: the end token is cut out wherever its text stands.
  words = {f't{i}': i for i in range(CONFIG.V)}
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(words, unk_token=f't{CONFIG.V - 1}')
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    eos_token=f't{long_tail.STOP}',
    pad_token=f't{CONFIG.V - 1}',
  ).save_pretrained(folder)
  prompt = prompts(groups).prompt
  texts = [
    ' '.join(f't{token}' for token in token_P[mask_P > 0])
    for token_P, mask_P in zip(prompt.token, prompt.mask, strict=True)
  ]
  (folder / 'prompts.json').write_text(json.dumps(texts))


if __name__ == '__main__':
  write(pathlib.Path(sys.argv[1]), groups=16)
