"""Videos of evaluations: `videos/step_000080.gif` in a run folder."""

from collections.abc import Callable, Mapping, Sequence
import functools
import io
import math
import pathlib
import re

import numpy as np
from PIL import Image, ImageDraw, ImageFont

LARGEST = 300_000  # Bytes of a video: a report holds three.
LASTS = 120  # Milliseconds of a picture,
LAST = 1500  # and of the last one, so that one sees how it ended.
STRIP, EDGE = 14, 3  # Pixels above a picture, and around it.
INK, PAPER, RUNNING = (70, 76, 88), (255, 255, 255), (190, 194, 202)
GOOD, BAD = (27, 150, 80), (200, 60, 50)
# Of all pictures every so many, and colors: until it is small enough.
COARSER = ((1, 128), (1, 48), (2, 48), (2, 16), (4, 16), (8, 8))


def path(folder: pathlib.Path, step: int) -> pathlib.Path:
  return folder / 'videos' / f'step_{step:06}.gif'


def paths(folder: pathlib.Path) -> dict[int, pathlib.Path]:
  """Videos that there are, by the updates made before."""
  found = {}
  for one in (folder / 'videos').glob('step_*.gif'):
    if said := re.fullmatch(r'step_(\d+)', one.stem):
      found[int(said[1])] = one
  return dict(sorted(found.items()))


def truncate(folder: pathlib.Path, step: int):
  """Removes those of later steps, which are made again."""
  for later, one in paths(folder).items():
    if later > step:
      one.unlink()


def try_write(
  folder: pathlib.Path,
  step: int,
  film: Mapping[str, np.ndarray],
  say: Callable[[str], None],
):
  """Writes a video, or says why there is none: no run ends by that."""
  try:
    write(path(folder, step), film)
  except Exception as error:  # noqa: BLE001 A policy is worth more.
    say(f'There is no video of step {step}: {error}')


def write(at: pathlib.Path, film: Mapping[str, np.ndarray]):
  """Writes a film of `stages.film`, if anything is shown in it."""
  if not (pictures := side_by_side(film)):
    return
  at.parent.mkdir(parents=True, exist_ok=True)
  part = at.with_name(f'{at.name}.part')
  part.write_bytes(encoded(pictures))
  part.replace(at)


def side_by_side(film: Mapping[str, np.ndarray]) -> list[Image.Image]:
  """Episodes next to each other, each in a frame that says how it goes.

  The frame is green while the task is solved; at the end, red if it never was.
  """
  shown = np.flatnonzero(np.asarray(film['shown']))
  F = np.shape(film['time'])[1]
  if not len(shown):
    return []
  columns = math.ceil(math.sqrt(len(shown)))
  rows = -(-len(shown) // columns)
  made = []
  for f in range(F):
    tiles = [_tile(film, k, f) for k in shown]
    wide, high = tiles[0].size
    sheet = Image.new('RGB', (columns * wide, rows * high), PAPER)
    for i, tile in enumerate(tiles):
      sheet.paste(tile, (i % columns * wide, i // columns * high))
    made.append(sheet)
  return made


def _tile(film, k: int, f: int) -> Image.Image:
  """A picture of an episode, with its seed and the steps made."""
  time, solved = film['time'][k], film['solved'][k] > 0
  over = time[f] == time[-1]
  color = GOOD if film['success'][k, f] > 0 else RUNNING
  if over:
    color = GOOD if solved else BAD
  frame = np.pad(film['frame'][k, f], ((EDGE, EDGE), (EDGE, EDGE), (0, 0)))
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


def encoded(pictures: Sequence[Image.Image]) -> bytes:
  """As a GIF, as coarse as it must be not to be too large."""
  for every, colors in COARSER:
    some = [*pictures[:-1:every], pictures[-1]]
    made = _encoded(some, every * LASTS, colors)
    if len(made) <= LARGEST:
      return made
  raise ValueError(
    f'its pictures take {len(made):,} bytes however coarse they are, and '
    f'{LARGEST:,} at most: draw smaller ones.'
  )


def _encoded(pictures, lasts: int, colors: int) -> bytes:
  """A GIF whose pictures share a palette, of what is in all of them."""
  few = pictures[:: max(1, len(pictures) // 4)]
  sample = np.concatenate([np.asarray(x) for x in few])
  # Of the ways there are, this one keeps what is small and colorful.
  octree = Image.Quantize.FASTOCTREE
  palette = Image.fromarray(sample).quantize(colors, octree)
  plain = Image.Dither.NONE  # So that what stands still stays as it is.
  drawn = [x.quantize(palette=palette, dither=plain) for x in pictures]
  file = io.BytesIO()
  drawn[0].save(
    *(file, 'GIF'),
    save_all=True,
    append_images=drawn[1:],
    duration=[lasts] * (len(drawn) - 1) + [LAST],
    loop=0,
  )
  return file.getvalue()
