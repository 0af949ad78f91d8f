"""LeRobot's config.json of a π0 or π0.5: what it reads, and how it acts.

LeRobot's networks have the published sizes only, which it knows by the names of
both transformers. Others get names that it refuses with an error, as it would
otherwise act with random weights.
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import Any

from stages.vla import lerobot_processors
from stages.vla.pi0 import pi0

FILE = 'config.json'
IMAGE, IMAGES = 'observation.image', 'observation.images.'
VISION = *'DLHF', 'image_size', 'patch_size'


def write(
  folder: str | pathlib.Path,
  config: pi0.Config,
  norm_stats: Mapping,
  *,
  cameras: Sequence[str],
  executed: int,
  num_steps: int,
):
  """Writes config.json, as LeRobot 0.6.1 reads it.

  Args:
    folder: of the model.
    config: sizes of the model.
    norm_stats: statistics of 'state' and 'actions', as
      `lerobot_processors.read` returns them.
    cameras: paths of images in observations, in the order in which they are
      read; see `feature`.
    executed: first actions of a chunk that are executed before the next chunk
      is decided.
    num_steps: K, steps from noise to actions.
  """
  found = _settings(config, norm_stats, cameras)
  found |= {'n_action_steps': executed, 'num_inference_steps': num_steps}
  (pathlib.Path(folder) / FILE).write_text(json.dumps(found, indent=2))


def feature(camera: str) -> str:
  """The feature of LeRobot that holds the images of a path in observations.

  'image/wrist' is observation.images.wrist, and 'image' is observation.image.
  """
  if camera == 'image':
    return IMAGE
  return f'{IMAGES}{camera.removeprefix("image/").replace("/", ".")}'


def variants(config: pi0.Config) -> dict[str, str]:
  """LeRobot's names of the sizes of both transformers.

  The first of them is of the vision tower, too. Sizes that are not the
  published ones are listed in the name.
  """
  known = pi0.published()
  trunk, own = (
    _sizes(x.trunk, 'VDLHKWF') | _sizes(x.vision, VISION, 'vision ')
    for x in (config, known)
  )
  return {
    'paligemma_variant': _name('gemma_2b', trunk, own),
    'action_expert_variant': _name(
      'gemma_300m',
      *(_sizes(x.expert, 'DLHKWF') for x in (config, known)),
    ),
  }


def _sizes(x, names: Sequence[str], prefix: str = '') -> dict[str, int]:
  return {f'{prefix}{k}': getattr(x, k) for k in names}


def _name(published: str, sizes: Mapping, known: Mapping) -> str:
  if sizes == known:
    return published
  other = ', '.join(f'{k} {x}' for k, x in sizes.items() if x != known[k])
  return f'{published} with other sizes: {other}'


def _settings(
  config: pi0.Config, norm_stats: Mapping, cameras: Sequence[str]
) -> dict[str, Any]:
  """Settings that follow from a model, its statistics and its cameras."""
  adaptive, edge = config.adaptive, config.vision.image_size
  features, modes = lerobot_processors.describe(norm_stats, adaptive=adaptive)
  relative = lerobot_processors.relative_config(norm_stats['actions'])
  image = {'type': 'VISUAL', 'shape': [3, edge, edge]}
  action, _, _ = lerobot_processors.PARTS['actions']
  return {
    'type': 'pi05' if adaptive else 'pi0',
    **variants(config),
    'dtype': 'float32',
    'input_features': {feature(x): image for x in cameras}
    | {k: x for k, x in features.items() if k != action},
    'output_features': {action: features[action]},
    'normalization_mapping': modes,
    'image_resolution': [edge, edge],
    'chunk_size': config.Z,
    'max_state_dim': config.O,
    'max_action_dim': config.A,
    'tokenizer_max_length': lerobot_processors.MAX_LENGTH[adaptive],
    'use_relative_actions': relative['enabled'],
    'relative_exclude_joints': relative['exclude_joints'],
    'action_feature_names': relative['action_names'],
  }
