"""A model of random weights, to measure with: speed does not depend on them.

  python -m experiments.h100.random_model CONFIG TOKENIZER FOLDER

CONFIG is a folder with a config.json, such as those of
`experiments/compiled/models`, TOKENIZER one with a tokenizer, such as that of
`make smollm`. FOLDER becomes a checkpoint in Hugging Face format.
"""

import json
import pathlib
import shutil
import sys

import jax

from stages.language import huggingface
from stages.models import transformer
from stages.models.files import weights_writer


def write(config_folder: pathlib.Path, tokenizer: pathlib.Path, folder):
  """Writes a checkpoint in bfloat16; its end tokens are the tokenizer's."""
  raw = json.loads((config_folder / 'config.json').read_text())
  known = json.loads((tokenizer / 'config.json').read_text())
  raw['eos_token_id'] = known['eos_token_id']
  raw['bos_token_id'] = known['bos_token_id']
  folder.mkdir(parents=True)
  (folder / 'config.json').write_text(json.dumps(raw, indent=2))
  for name in huggingface.COMPANIONS:
    if (tokenizer / name).is_file() and name != 'generation_config.json':
      shutil.copy(tokenizer / name, folder / name)
  config = huggingface.load_config(folder)
  params = jax.jit(transformer.init_params, static_argnums=0)(
    config, jax.random.key(0)
  )
  names = huggingface.names(folder)
  weights_writer.save(folder, params, names, dtype='bfloat16')


if __name__ == '__main__':
  write(*map(pathlib.Path, sys.argv[1:]))
