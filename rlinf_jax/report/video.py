"""Videos of evaluations: `videos/step_000080.gif` in a run folder."""

from collections.abc import Callable, Mapping, Sequence
import functools
import io
import math
import pathlib
import re

import numpy as np
from PIL import Image, ImageDraw, ImageFont

MAX_BYTES = 300_000  # Of a video: a report contains three.
FRAME_MS = 120  # Milliseconds that a frame is shown,
LAST_FRAME_MS = 1500  # and the last one, to show the outcome.
STRIP, EDGE = 14, 3  # Pixels above a picture, and around it.
# Pixels of a picture, which is repeated to be as wide: its seed of ten digits
# and its step are written above it.
MIN_WIDTH = 108
INK, PAPER, RUNNING = (70, 76, 88), (255, 255, 255), (190, 194, 202)
GOOD, BAD = (27, 150, 80), (200, 60, 50)
# (Frame interval, number of colors), tried in order until a video is small
# enough.
QUALITIES = ((1, 128), (1, 48), (2, 48), (2, 16), (4, 16), (8, 8))


def path(folder: pathlib.Path, step: int) -> pathlib.Path:
  """The file of the video after `step` updates."""
  return folder / 'videos' / f'step_{step:06}.gif'


def paths(folder: pathlib.Path) -> dict[int, pathlib.Path]:
  """The videos of a run folder, by updates finished."""
  videos = {}
  for file in (folder / 'videos').glob('step_*.gif'):
    if match := re.fullmatch(r'step_(\d+)', file.stem):
      videos[int(match[1])] = file
  return dict(sorted(videos.items()))


def truncate(folder: pathlib.Path, step: int):
  """Removes the videos after `step`, which a resumed run makes again."""
  for later, file in paths(folder).items():
    if later > step:
      file.unlink()


def try_write(
  folder: pathlib.Path,
  step: int,
  frames: Mapping[str, np.ndarray],
  notify: Callable[[str], None],
):
  """Writes a video; reports a failure by `notify` and does not raise it."""
  try:
    write(path(folder, step), frames)
  except Exception as error:  # noqa: BLE001 Training is worth more than a video.
    notify(f'There is no video of step {step}: {error}')


def write(file: pathlib.Path, frames: Mapping[str, np.ndarray]):
  """Writes the frames of an evaluation as a GIF, if there are any."""
  if not (pictures := side_by_side(frames)):
    return
  file.parent.mkdir(parents=True, exist_ok=True)
  part = file.with_name(f'{file.name}.part')
  part.write_bytes(encode(pictures))
  part.replace(file)


def side_by_side(film: Mapping[str, np.ndarray]) -> list[Image.Image]:
  """Arranges episodes in a grid of pictures, one grid per time step.

  The border of a picture is green while the task is solved. At the end of the
  episode it is red if the task never was.
  """
  shown = np.flatnonzero(np.asarray(film['shown']))
  F = np.shape(film['time'])[1]
  if not len(shown):
    return []
  columns = math.ceil(math.sqrt(len(shown)))
  rows = -(-len(shown) // columns)
  sheets = []
  for f in range(F):
    tiles = [_tile(film, k, f) for k in shown]
    wide, high = tiles[0].size
    sheet = Image.new('RGB', (columns * wide, rows * high), PAPER)
    for i, tile in enumerate(tiles):
      sheet.paste(tile, (i % columns * wide, i // columns * high))
    sheets.append(sheet)
  return sheets


def _tile(film, k: int, f: int) -> Image.Image:
  """The picture of an episode, with its seed and the number of steps."""
  time, solved = film['time'][k], film['solved'][k] > 0
  over = time[f] == time[-1]
  color = GOOD if film['success'][k, f] > 0 else RUNNING
  if over:
    color = GOOD if solved else BAD
  frame = film['frame'][k, f]
  times = -(-MIN_WIDTH // frame.shape[1])
  frame = frame.repeat(times, 0).repeat(times, 1)
  frame = np.pad(frame, ((EDGE, EDGE), (EDGE, EDGE), (0, 0)))
  edge = np.ones(frame.shape[:2], bool)
  edge[EDGE:-EDGE, EDGE:-EDGE] = False
  frame[edge] = color
  picture = Image.fromarray(frame)
  wide, high = picture.size
  tile = Image.new('RGB', (wide + EDGE, high + STRIP + EDGE), PAPER)
  tile.paste(picture, (0, STRIP))
  draw, font = ImageDraw.Draw(tile), _font()
  draw.text((EDGE, 0), f'seed {film["seed"][k]}', color if over else INK, font)
  draw.text((wide, 0), str(time[f]), INK, font, anchor='ra')
  return tile


@functools.cache
def _font():
  return ImageFont.load_default(10)


def encode(pictures: Sequence[Image.Image]) -> bytes:
  """Encodes a GIF, in the best quality that is small enough.

  Raises:
    ValueError: if even the lowest quality exceeds `MAX_BYTES`.
  """
  for every, colors in QUALITIES:
    selected = [*pictures[:-1:every], pictures[-1]]
    data = _encode(selected, every * FRAME_MS, colors)
    if len(data) <= MAX_BYTES:
      return data
  raise ValueError(
    f'it has {len(data):,} bytes in the lowest quality, and the limit is '
    f'{MAX_BYTES:,}. Draw smaller pictures.'
  )


def _encode(pictures, duration: int, colors: int) -> bytes:
  """Encodes a GIF whose pictures share one palette."""
  subset = pictures[:: max(1, len(pictures) // 4)]
  sample = np.concatenate([np.asarray(x) for x in subset])
  # The method that best keeps small colorful objects.
  octree = Image.Quantize.FASTOCTREE
  palette = Image.fromarray(sample).quantize(colors, octree)
  no_dither = Image.Dither.NONE  # Keeps still regions constant over time.
  frames = [x.quantize(palette=palette, dither=no_dither) for x in pictures]
  file = io.BytesIO()
  frames[0].save(
    file,
    'GIF',
    save_all=True,
    append_images=frames[1:],
    duration=[duration] * (len(frames) - 1) + [LAST_FRAME_MS],
    loop=0,
  )
  return file.getvalue()
