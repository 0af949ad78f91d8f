r"""A tiny language model with random weights, and questions about sums.

  python -m rlinf_jax.prepare.tiny_text --out tiny

writes tiny/model, tiny/train.jsonl and tiny/test.jsonl. A question is `3+4=`,
of numbers whose sum has one digit: a quarter of the 55 is held out. With them,
recipes for questions from files can be tried in minutes, without a checkpoint:
some answers of random weights are right, which is enough to learn from.
"""

import json
import pathlib

from absl import flags
import jax
import numpy as np

from rlinf_jax import command_line, startup
from stages import ranges
from stages.language import huggingface, tokens
from stages.models import transformer
from stages.models.layers import rope

# Other programs have a flag of this name, and tests import several of them.
OUT = flags.DEFINE_string(
  'out', 'tiny', 'Folder of the model and the data.', allow_override=True
)

HELD_OUT = 4  # One question of so many is for evaluation alone.
TEMPLATE = '{% for message in messages %}{{ message.content }}{% endfor %}'


def questions() -> list[dict[str, str]]:
  """All questions with their answers, in a random order."""
  rows = [
    {'prompt': f'{a}+{b}=', 'answer': str(a + b)}
    for a in range(10)
    for b in range(10 - a)
  ]
  order = np.random.default_rng(0).permutation(len(rows))
  return [rows[i] for i in order]


def model(folder: pathlib.Path, seed: ranges.NonNegativeInt = 0):
  """Writes the folder of a new model, with a tokenizer of the questions."""
  texts = [row['prompt'] + row['answer'] for row in questions()]
  tokenizer = tokens.train_tokenizer(folder, texts, 13)
  tokenizer.chat_template = TEMPLATE
  tokenizer.save_pretrained(folder)
  config = transformer.Config(
    V=len(tokenizer),
    D=64,
    L=2,
    H=4,
    K=2,
    W=16,
    F=128,
    rope=rope.RopeConfig(theta=100.0),
  )
  huggingface.save(
    folder,
    transformer.init_params(config, jax.random.key(seed)),
    config,
    eos_token_id=tokenizer.eos_token_id,
  )


def write(folder: pathlib.Path):
  """Writes train.jsonl and test.jsonl, which have no question in common."""
  rows = questions()
  held_out = len(rows) // HELD_OUT
  for name, some in ('train', rows[held_out:]), ('test', rows[:held_out]):
    text = '\n'.join(map(json.dumps, some))
    (folder / f'{name}.jsonl').write_text(f'{text}\n')


def main():
  """Writes the model and both files."""
  out = command_line.new_folder(OUT)
  model(out / 'model')
  write(out)
  print(f'{out}/model, {out}/train.jsonl and {out}/test.jsonl are written.')


if __name__ == '__main__':
  with startup.ended():
    command_line.run(main)
