"""preprocessor_config.json: how a published model's pictures are prepared.

The file is that of OpenVLA's processor: for each vision tower the arguments of
torchvision's resizing, of its center crop and of its normalization. A model
was trained with these numbers, which may be rounded: the mean of DINOv2's red
is 0.484375 there, that of ImageNet in bfloat16.
"""

from collections.abc import Iterator, Mapping
import math
import pathlib
from typing import Any

from stages.models.files import weights
from stages.models.vision import resample
from stages.vla import pictures

FILE = 'preprocessor_config.json'
# Filters by their numbers in Pillow.
PILLOW: dict[int, resample.Filter] = {
  1: 'lanczos',
  2: 'bilinear',
  3: 'bicubic',
}
PARTS = ('tvf_resize_params', 'tvf_crop_params', 'tvf_normalize_params')


def read(
  checkpoint: str | pathlib.Path, sizes: tuple[int, ...], strategy: str
) -> pictures.Pictures:
  """The pre-processing of a checkpoint.

  A folder without the file has that of `pictures.Pictures`, as published.

  Args:
    checkpoint: folder of a model.
    sizes: edge of each tower's input, in pixels.
    strategy: of config.json, for a folder without the file.

  Raises:
    CheckpointError: names all that is wrong or not supported.
    ValueError: for an unknown strategy.
  """
  path = pathlib.Path(checkpoint) / FILE
  if not path.is_file():
    return pictures.Pictures(sizes, strategy=strategy)
  raw = weights.read_json(path)
  faults = [*_faults(raw, sizes)]
  if faults:
    raise weights.CheckpointError(
      f'{path} cannot prepare pictures for this model: {"; ".join(faults)}.'
    )
  resize, _, normalize = (raw[name] for name in PARTS)
  return pictures.Pictures(
    sizes,
    *(tuple(tuple(x[key]) for x in normalize) for key in ('mean', 'std')),
    strategy=raw.get('image_resize_strategy', strategy),
    filters=tuple(PILLOW[x['interpolation']] for x in resize),
  )


def _faults(raw: Any, sizes: tuple[int, ...]) -> Iterator[str]:
  """Yields what the file says that cannot be done, in a sentence each."""
  if not isinstance(raw, Mapping):
    yield f'it is a {type(raw).__name__}, expected an object'
    return
  lacking = [
    name
    for name in PARTS
    if not isinstance(raw.get(name), list)
    or len(raw[name]) != len(sizes)
    or not all(isinstance(x, Mapping) for x in raw[name])
  ]
  for name in lacking:
    yield (
      f'{name} is {raw.get(name)!r:.60}, expected a list of {len(sizes)} '
      'objects, one for each vision tower'
    )
  if lacking:
    return
  for i, (size, *tower) in enumerate(
    zip(sizes, *(raw[name] for name in PARTS), strict=True)
  ):
    for fault in _of_tower(size, *tower):
      yield f'tower {i}: {fault}'
  yield from _of_borders(raw)


def _of_tower(size: int, resize, crop, normalize) -> Iterator[str]:
  """Yields what is wrong with the settings of one tower."""
  if resize.get('size') not in (size, [size], [size, size]):
    yield f'it is resized to {resize.get("size")!r:.40}, expected {size} pixels'
  if resize.get('interpolation') not in (*PILLOW,):
    known = ', '.join(f'{n} ({name})' for n, name in PILLOW.items())
    got = resize.get('interpolation')
    yield f'interpolation is {got!r:.40}, expected one of {known}'
  if resize.get('antialias') is False:
    yield 'antialias is false, expected true'
  if crop.get('output_size') not in (size, [size, size]):
    got = crop.get('output_size')
    yield f'it is cropped to {got!r:.40}, expected {size} pixels'
  for name, least in ('mean', -math.inf), ('std', 0.0):
    got = normalize.get(name)
    if not (
      isinstance(got, list)
      and len(got) == 3
      and all(isinstance(x, int | float) and least < x < math.inf for x in got)
    ):
      above = ' above 0' if name == 'std' else ''
      yield f'{name} is {got!r:.60}, expected three numbers{above}'


def _of_borders(raw: Mapping[str, Any]) -> Iterator[str]:
  """Yields where borders differ from those of the strategy."""
  boxed = raw.get('image_resize_strategy') == 'letterbox'
  given = raw.get('tvf_do_letterbox')
  if given is not None and bool(given) != boxed:
    yield (
      f'tvf_do_letterbox is {given!r:.40} and image_resize_strategy is '
      f'{raw.get("image_resize_strategy")!r:.40}, which disagree'
    )
