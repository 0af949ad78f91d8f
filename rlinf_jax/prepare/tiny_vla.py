r"""A tiny OpenVLA in the published layout, and episodes in LeRobot's format.

  python -m rlinf_jax.prepare.tiny_vla --out tiny

writes tiny/model, with random weights, and tiny/data: episodes in which a
scripted controller pushes the puck to the disc that an instruction names. With
both, a recipe for published models can be tried in minutes.
"""

from collections.abc import Iterator, Sequence
import json
import pathlib

from absl import flags
import jax
import numpy as np

from rlinf_jax import command_line, startup
from rlinf_jax.data.lerobot import write
from stages import base, ranges
from stages.envs import demonstrations, push
from stages.language import tokens
from stages.models.files import weights_writer
from stages.vla import instructions
from stages.vla.openvla import openvla, openvla_files, openvla_settings

# Other programs have a flag of this name, and tests import several of them.
OUT = flags.DEFINE_string(
  'out', 'tiny', 'Folder of the model and the data.', allow_override=True
)
EPISODES = flags.DEFINE_integer('episodes', 512, 'Episodes to try.', 1, 10**6)

CAMERA = 'observation.images.table'
FPS = 10
BINS, PADDED = 16, 8
PIXELS, PATCH = 32, 8
DINO, SIGLIP = [*openvla_files.TOWERS][:2]
# Sizes of both towers and of the language model, with 0.15M parameters.
TOWER = {
  'embed_dim': 32,
  'depth': 2,
  'num_heads': 2,
  'mlp_ratio': 2,
  'patch_size': PATCH,
}
LLAMA = {
  'model_type': 'llama',
  'hidden_size': 64,
  'num_hidden_layers': 2,
  'num_attention_heads': 2,
  'intermediate_size': 128,
  'initializer_range': 0.1,
}
# The mean is the color of the table, so that a patch without a disc is zero.
TABLE, STD = [0.11, 0.11, 0.126], [0.3, 0.3, 0.3]


def model(
  folder: pathlib.Path,
  seed: ranges.NonNegativeInt = 0,
  tasks: Sequence[str] = push.INSTRUCTIONS,
  actions: ranges.PositiveInt = 2,
):
  """Writes the folder of a new model, with a tokenizer of its prompts.

  Args:
    folder: where to.
    seed: of its weights.
    tasks: instructions whose characters and words the tokenizer knows.
    actions: numbers of an action, −1 … 1.
  """
  texts = [instructions.openvla_text(task) for task in tasks]
  bounds = {'q01': [-1.0] * actions, 'q99': [1.0] * actions}
  vocabulary = len(tokens.train_tokenizer(folder, texts, 256))
  config = {
    'architectures': ['OpenVLAForActionPrediction'],
    'model_type': 'openvla',
    'image_resize_strategy': 'resize-naive',
    'image_sizes': [PIXELS, PIXELS],
    'n_action_bins': BINS,
    'norm_stats': {'none': {'action': bounds}},
    'pad_to_multiple_of': PADDED,
    'timm_model_ids': [DINO, SIGLIP],
    openvla_settings.TOWER_ARGS: [TOWER, TOWER],
    'torch_dtype': 'float32',
    'use_fused_vision_backbone': True,
    # Actions have tokens of their own behind those of texts.
    'text_config': LLAMA | {'vocab_size': vocabulary + BINS + PADDED},
  }
  (folder / 'config.json').write_text(json.dumps(config, indent=2))
  resize = {'size': [PIXELS, PIXELS], 'interpolation': 3, 'antialias': True}
  processor = {
    'image_resize_strategy': 'resize-naive',
    'tvf_resize_params': [resize] * 2,
    'tvf_crop_params': [{'output_size': [PIXELS, PIXELS]}] * 2,
    'tvf_normalize_params': [{'mean': TABLE, 'std': STD}] * 2,
  }
  (folder / 'preprocessor_config.json').write_text(json.dumps(processor))
  made = openvla_files.read(folder).config
  params = openvla.init_params(made, jax.random.key(seed))
  weights_writer.save(folder, params, openvla_files.names(made))


def numbered(tasks: Sequence[str]) -> base.Prompt:
  """The number of each task in place of tokens."""
  token_NP = np.arange(len(tasks), dtype=np.int32)[:, None]
  return base.Prompt(token_NP, np.ones_like(token_NP))


def episodes(
  num_episodes: ranges.PositiveInt,
  num_envs: ranges.PositiveInt = 256,
  noise_std: ranges.NonNegativeFloat = 0.05,
) -> Iterator[write.Episode]:
  """Yields the episodes of the controller that succeed."""
  settings = {'dense': False, 'terminate': True, 'instructions': numbered}
  for rows, kept_BT in demonstrations.episodes(
    push.push(image_size=PIXELS, **settings),
    push.controller,
    num_envs=num_envs,
    noise_std=noise_std,
    num_episodes=num_episodes,
    controller_env=push.push(**settings),
  ):
    for b in np.flatnonzero(kept_BT.any(1)):
      x = jax.tree.map(lambda y, b=b: y[b][kept_BT[b]], rows)
      task = int(x.obs[base.PROMPT]['token'][0, 0])
      yield write.Episode(
        push.INSTRUCTIONS[task],
        np.clip(x.action, -1.0, 1.0),
        x.obs['state'],
        {CAMERA: x.obs['image']['table']},
      )


def main():
  """Writes both folders."""
  out = command_line.new_folder(OUT)
  model(out / 'model')
  write.write(out / 'data', episodes(EPISODES.value), fps=FPS)
  print(f'{out}/model and {out}/data are written.')


if __name__ == '__main__':
  with startup.ended():
    command_line.run(main)
