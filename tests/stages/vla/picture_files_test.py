"""preprocessor_config.json of OpenVLA's published folders."""

import copy
import json

import numpy as np
import pytest

from stages.models.files import weights
from stages.vla import picture_files
from stages.vla.openvla import openvla_files
from tests.stages.vla.openvla import openvla_files_test as plain

SIZES = (4, 4)
# As published with openvla-7b, but for the size: ImageNet's numbers are rounded
# to bfloat16.
PUBLISHED = {
  'auto_map': {
    'AutoImageProcessor': 'processing_prismatic.PrismaticImageProcessor'
  },
  'image_processor_type': 'PrismaticImageProcessor',
  'image_resize_strategy': 'resize-naive',
  'input_sizes': [[3, 4, 4], [3, 4, 4]],
  'interpolations': ['bicubic', 'bicubic'],
  'means': [[0.485, 0.456, 0.406], [0.5, 0.5, 0.5]],
  'stds': [[0.229, 0.224, 0.225], [0.5, 0.5, 0.5]],
  'tvf_crop_params': [{'output_size': [4, 4]}, {'output_size': [4, 4]}],
  'tvf_do_letterbox': False,
  'tvf_letterbox_fill': None,
  'tvf_normalize_params': [
    {
      'inplace': False,
      'mean': [0.484375, 0.455078125, 0.40625],
      'std': [0.228515625, 0.2236328125, 0.224609375],
    },
    {'inplace': False, 'mean': [0.5] * 3, 'std': [0.5] * 3},
  ],
  'tvf_resize_params': [
    {'antialias': True, 'interpolation': 3, 'max_size': None, 'size': [4, 4]},
    {'antialias': True, 'interpolation': 2, 'max_size': None, 'size': [4, 4]},
  ],
  'use_fused_vision_backbone': True,
}


def write(folder, **changed):
  (folder / picture_files.FILE).write_text(json.dumps(PUBLISHED | changed))
  return folder


def test_pictures_are_prepared_as_the_folder_says(tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(plain.CONFIG))
  settings = openvla_files.read(
    write(tmp_path), towers=plain.TOWERS
  ).config.pictures
  assert settings.means[0] == (0.484375, 0.455078125, 0.40625)
  assert settings.stds[0] == (0.228515625, 0.2236328125, 0.224609375)
  assert settings.means[1] == settings.stds[1] == (0.5, 0.5, 0.5)
  assert settings.filters == ('bicubic', 'bilinear')
  rng = np.random.default_rng(0)
  image = rng.integers(0, 256, (1, 9, 7, 3), np.uint8)
  dino, siglip = settings(image)
  from PIL import Image

  for got, kind, tower in (dino, 3, 0), (siglip, 2, 1):
    resized = Image.fromarray(image[0]).resize((4, 4), kind)
    want = (np.asarray(resized) / 255.0 - settings.means[tower]) / (
      settings.stds[tower]
    )
    np.testing.assert_allclose(got[0], want, atol=1e-5)


def test_a_folder_without_the_file_has_the_published_settings(tmp_path):
  settings = picture_files.read(tmp_path, SIZES, 'letterbox')
  assert settings.strategy == 'letterbox' and settings.means[1] == (0.5,) * 3


@pytest.mark.parametrize(
  ('part', 'tower', 'key', 'value', 'message'),
  [
    ('resize', 0, 'size', [8, 8], r'tower 0: it is resized to \[8, 8\]'),
    ('resize', 1, 'interpolation', 0, 'interpolation is 0, expected one of 1'),
    ('resize', 1, 'antialias', False, 'antialias is false'),
    ('crop', 0, 'output_size', [2, 2], r'cropped to \[2, 2\], expected 4'),
    ('normalize', 0, 'mean', [0.5], r'mean is \[0.5\], expected three'),
    ('normalize', 1, 'std', [0.0] * 3, 'three numbers above 0'),
  ],
)
def test_what_is_not_supported_is_named(
  tmp_path, part, tower, key, value, message
):
  changed = copy.deepcopy(PUBLISHED[f'tvf_{part}_params'])
  changed[tower][key] = value
  write(tmp_path, **{f'tvf_{part}_params': changed})
  with pytest.raises(weights.CheckpointError, match=message):
    picture_files.read(tmp_path, SIZES, 'resize-naive')


@pytest.mark.parametrize(
  ('changed', 'message'),
  [
    ({'tvf_crop_params': [{}]}, 'tvf_crop_params is .* a list of 2 objects'),
    ({'tvf_do_letterbox': True}, 'which disagree'),
  ],
)
def test_settings_that_do_not_go_together_are_named(tmp_path, changed, message):
  with pytest.raises(weights.CheckpointError, match=message):
    picture_files.read(write(tmp_path, **changed), SIZES, 'resize-naive')
