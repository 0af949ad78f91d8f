r"""A tiny Qwen2.5-VL with random weights, and questions about bar charts.

  python -m rlinf_jax.prepare.tiny_vision --out tiny

writes tiny/model, tiny/train.jsonl and tiny/test.jsonl with the pictures that
they name. A chart has a red, a green and a blue bar, 1 to 5 units high, and a
question asks for the height of one of them: chance is one in five.
With them, recipes for questions about pictures can be tried in minutes. With
--shuffled, charts are shuffled among the questions, so that nothing is to be
learned from them.
"""

import json
import pathlib

from absl import flags
import jax
import numpy as np

from rlinf_jax import command_line, startup
from stages import ranges
from stages.language import huggingface, tokens
from stages.models import config as config_lib
from stages.models import transformer
from stages.models.layers import rope

# Other programs have a flag of this name, and tests import several of them.
OUT = flags.DEFINE_string(
  'out', 'tiny', 'Folder of the model and the data.', allow_override=True
)
ROWS = flags.DEFINE_integer('rows', 4000, 'Questions to train on.', 1, 10**6)
HELD_OUT = flags.DEFINE_integer(
  'held_out', 256, 'Questions to evaluate on.', 1, 10**6
)
SHUFFLED = flags.DEFINE_bool(
  'shuffled', False, 'Whether questions have the chart of another, at random.'
)

PLACE = '<|image_pad|>'
SPECIAL = (
  '<|im_start|>',
  '<|im_end|>',
  '<|vision_start|>',
  '<|vision_end|>',
  PLACE,
)
# As the published one, without a system message and films.
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}\
{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}\
{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
COLORS = {'red': (220, 40, 40), 'green': (40, 180, 60), 'blue': (50, 70, 220)}
HIGHEST, UNIT, COLUMN = 5, 14, 28  # Units of a bar; pixels.
WHITE = 245


def question(color: str) -> str:
  return f'How tall is the {color} bar?'


def model(folder: pathlib.Path, seed: ranges.NonNegativeInt = 0):
  """Writes the folder of a new model, with a tokenizer of the questions."""
  texts = [question(color) + '0123456789 user assistant\n' for color in COLORS]
  tokenizer = tokens.train_tokenizer(folder, texts, 128)
  tokenizer.add_tokens([*SPECIAL], special_tokens=True)
  tokenizer.eos_token = '<|im_end|>'
  tokenizer.chat_template = TEMPLATE
  tokenizer.save_pretrained(folder)
  vision = config_lib.VisionConfig(
    D=64,
    L=2,
    H=4,
    F=128,
    token=tokenizer.convert_tokens_to_ids(PLACE),
    full_layers=(1,),
  )
  config = transformer.Config(
    V=-(-len(tokenizer) // 8) * 8,
    D=64,
    L=2,
    H=4,
    K=2,
    W=16,
    F=128,
    rope=rope.RopeConfig(theta=100.0, sections=(2, 3, 3)),
    init_stddev=0.05,
    vision=vision,
  )
  huggingface.save(
    folder,
    transformer.init_params(config, jax.random.key(seed)),
    config,
    model_type='qwen2_5_vl',
    bos_token_id=None,
    eos_token_id=tokenizer.eos_token_id,
  )


def is_held_out(height_of: dict[str, int]) -> bool:
  """Whether charts with these heights are for evaluation alone."""
  return sum(n * h for n, h in enumerate(height_of.values(), 1)) % 5 == 0


def chart(rng: np.random.Generator, height_of: dict[str, int]) -> np.ndarray:
  """A chart of 84 x 84 pixels; where in its column a bar stands, is random."""
  image = np.full((3 * COLUMN, 3 * COLUMN, 3), WHITE, np.uint8)
  for column, color in enumerate(height_of):
    left = column * COLUMN + rng.integers(8)
    top = len(image) - height_of[color] * UNIT
    image[top:, left : left + COLUMN - 8] = COLORS[color]
  return image


def write(
  folder: pathlib.Path,
  name: str,
  rows: ranges.PositiveInt,
  *,
  held_out: bool,
  shuffled: bool = False,
  seed: ranges.NonNegativeInt = 0,
):
  """Writes NAME.jsonl with questions, and their pictures in the folder NAME.

  Args:
    folder: where both are written.
    name: of both.
    rows: number of questions.
    held_out: whether the charts are those for evaluation.
    shuffled: whether the charts are shuffled among the questions.
    seed: of all that is drawn.
  """
  from PIL import Image

  rng = np.random.default_rng([seed, held_out])
  (folder / name).mkdir(parents=True)
  lines = []
  while len(lines) < rows:
    drawn = rng.integers(1, HIGHEST + 1, len(COLORS)).tolist()
    height_of = dict(zip(COLORS, drawn, strict=True))
    if is_held_out(height_of) != held_out:
      continue
    path = f'{name}/{len(lines)}.png'
    Image.fromarray(chart(rng, height_of)).save(folder / path)
    color = [*COLORS][rng.integers(len(COLORS))]
    lines.append(
      {
        'image': path,
        'prompt': question(color),
        'answer': str(height_of[color]),
      }
    )
  if shuffled:
    paths = rng.permutation([line['image'] for line in lines]).tolist()
    lines = [
      line | {'image': path} for line, path in zip(lines, paths, strict=True)
    ]
  text = '\n'.join(map(json.dumps, lines))
  (folder / f'{name}.jsonl').write_text(f'{text}\n')


def main():
  """Writes the model and both files."""
  out = command_line.new_folder(OUT)
  model(out / 'model')
  for name, rows in ('train', ROWS.value), ('test', HELD_OUT.value):
    write(out, name, rows, held_out=name == 'test', shuffled=SHUFFLED.value)
  print(f'{out}/model, {out}/train.jsonl and {out}/test.jsonl are written.')


if __name__ == '__main__':
  with startup.ended():
    command_line.run(main)
