"""Patches and positions of pictures, compared with `transformers`."""

import json

import numpy as np
import pytest
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pil

from stages.models import config as config_lib
from stages.models.files import weights
from stages.models.vision import patches, vision_files

VISION = config_lib.VisionConfig(D=8, L=1, H=2, F=8, token=9, full_layers=())


def test_pictures_are_resized_to_the_shapes_of_transformers():
  rng = np.random.default_rng(0)
  for rows, columns in np.exp(rng.uniform(0.7, 8.0, (400, 2))).astype(int):
    if max(rows, columns) > 200 * min(rows, columns):
      continue
    for least, most in (3136, 1003520), (784, 7840):
      limits = {'min_pixels': least, 'max_pixels': most}
      got = patches.resized_shape((rows, columns), 28, **limits)
      assert got == pil.smart_resize(int(rows), int(columns), 28, **limits)


def test_a_thin_picture_is_refused():
  with pytest.raises(ValueError, match='no edge may be over 200 times'):
    patches.resized_shape((1, 201), 28, 3136, 10**6)


@pytest.mark.parametrize(
  ('key', 'value'),
  [('do_normalize', False), ('rescale_factor', 1.0), ('resample', 2)],
)
def test_another_preparation_of_pictures_is_refused(key, value, tmp_path):
  path = tmp_path / vision_files.PROCESSORS[0]
  published = json.loads(pil.Qwen2VLImageProcessorPil().to_json_string())
  path.write_text(json.dumps(published))
  assert vision_files.read_processor(tmp_path) == vision_files.Processor()
  path.write_text(json.dumps(published | {key: value}))
  with pytest.raises(weights.CheckpointError, match=f'{key} is {value}, exp'):
    vision_files.read_processor(tmp_path)


def test_patches_are_those_of_transformers():
  image = np.random.default_rng(0).integers(0, 256, (56, 84, 3), np.uint8)
  processor = pil.Qwen2VLImageProcessorPil(min_pixels=784)
  want = processor(image, return_tensors='np')['pixel_values']
  got = patches.normalized(patches.cut(image, VISION)[None], VISION)[0]
  want = want.reshape(-1, 3, 2, 14, 14)
  for frame in want[:, :, 0], want[:, :, 1]:
    np.testing.assert_allclose(got, frame, rtol=0, atol=1e-6)


def test_positions_go_on_from_the_longer_edge_of_a_picture():
  got = patches.positions(
    [1, 9, 9, 9, 9, 9, 9, 2, 9, 9, 3], [(2, 3), (1, 2)], 9
  )
  want = [
    [0, 0, 0],
    *([1, 1 + row, 1 + column] for row in range(2) for column in range(3)),
    [4, 4, 4],
    [5, 5, 5],
    [5, 5, 6],
    [7, 7, 7],
  ]
  np.testing.assert_array_equal(got, want)


def test_places_go_square_by_square():
  got = patches.places((2, 4), 2).tolist()
  assert got[:4] == [[0, 0], [0, 1], [1, 0], [1, 1]]
  assert got[4:] == [[0, 2], [0, 3], [1, 2], [1, 3]]
