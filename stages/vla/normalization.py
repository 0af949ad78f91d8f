"""States and actions of a robot in the units of π0 and π0.5.

π0 was trained on (x − mean) / std of its data set, and π0.5 on numbers that are
−1 and 1 at the quantiles q01 and q99. Neither is clipped, as in openpi. A
checkpoint of openpi has these statistics in assets/NAME/norm_stats.json, one of
LeRobot in its processors, which also tell how they are used.
"""

from collections.abc import Callable, Mapping
import json
import pathlib
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from stages.models.files import weights
from stages.vla import lerobot_processors
from stages.vla import relative_actions as relative_lib

ASSETS, FILE = 'assets', 'norm_stats.json'
RELATIVE = 'relative_actions'  # Beside the statistics in this file.
# The statistics that a mode of LeRobot needs.
MODES = {
  'MEAN_STD': ('mean', 'std'),
  'QUANTILES': ('q01', 'q99'),
  'QUANTILE10': ('q10', 'q90'),
  'MIN_MAX': ('min', 'max'),
}

Part = Literal['state', 'actions']


class Normalization(NamedTuple):
  """An affine map of each number: y = (x − origin) / unit + value.

  Attributes:
    origin: a number in the units of the robot.
    unit: what becomes one.
    value: what the origin becomes.
  """

  origin: Float[Array, ' A']
  unit: Float[Array, ' A']
  value: float

  def normalize(self, x):
    """y of x, [..., A]."""
    return (x - _leading(self.origin, x)) / _leading(self.unit, x) + self.value

  def unnormalize(self, y):
    """x of y, [..., A]."""
    return (y - self.value) * _leading(self.unit, y) + _leading(self.origin, y)


def of(norm_stats: Any, part: Part, *, quantiles: bool) -> Normalization:
  """The normalization of a data set's states or actions.

  Args:
    norm_stats: statistics of 'state' and 'actions', each with 'mean' and 'std',
      or 'q01' and 'q99', as in norm_stats.json. Those of LeRobot have their
      'mode', which counts then, and 'eps'.
    part: which of them.
    quantiles: whether by quantiles, as π0.5; otherwise by mean and standard
      deviation, as π0.

  Raises:
    ValueError: if they are missing or no numbers.
  """
  entry = norm_stats.get(part) if isinstance(norm_stats, Mapping) else None
  mode = entry.get('mode') if isinstance(entry, Mapping) else None
  if mode == 'IDENTITY':
    return _as_they_are(entry, part)
  if mode is not None and mode not in MODES:
    raise ValueError(
      f'The mode of the statistics of {part!r} is {mode!r}, and these are '
      f'known: {", ".join((*MODES, "IDENTITY"))}.'
    )
  names = MODES[mode or ('QUANTILES' if quantiles else 'MEAN_STD')]
  model = 'π0.5' if quantiles else 'π0'
  in_ranges = names != MODES['MEAN_STD']
  if not isinstance(entry, Mapping) or not {*names} <= {*entry}:
    found = [*entry] if isinstance(entry, Mapping) else norm_stats
    raise ValueError(
      f'{model} needs the statistics {names[0]!r} and {names[1]!r} of '
      f'{part!r}, and there are {found!r:.100}: compute them from its data.'
    )
  try:
    first, second = (np.asarray(entry[x], np.float64) for x in names)
    if first.shape != second.shape or first.ndim != 1 or not first.size:
      raise ValueError(f'shapes {[*first.shape]} and {[*second.shape]}')
    if not (np.isfinite(first) & np.isfinite(second)).all():
      raise ValueError('not finite')
    if (second < (first if in_ranges else 0.0)).any():
      raise ValueError('a range or a standard deviation below zero')
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'The statistics {names[0]!r} and {names[1]!r} of {part!r} are not two '
      f'lists of as many numbers ({error}): compute them again.'
    ) from error
  openpis = lerobot_processors.OPENPI_EPSILON
  eps = openpis if mode is None else float(entry.get('eps', openpis))
  unit = second + eps
  if in_ranges:
    width = second - first
    # LeRobot replaces an empty range, where openpi widens all of them.
    width = width + eps if mode is None else np.where(width == 0, eps, width)
    unit = width / 2.0
  value = -1.0 if in_ranges else 0.0
  return Normalization(np.float32(first), np.float32(unit), value)


def _as_they_are(entry: Mapping, part: str) -> Normalization:
  """The normalization of what LeRobot leaves as it is."""
  shape = entry.get('shape')
  if not isinstance(shape, list) or len(shape) != 1:
    raise ValueError(
      f'The mode of the statistics of {part!r} is IDENTITY, and their shape is '
      f'{shape!r}, expected that of a vector.'
    )
  (width,) = shape
  return Normalization(np.zeros(width, 'f4'), np.ones(width, 'f4'), 0.0)


def normalizer(norm_stats: Any, *, quantiles: bool) -> Callable:
  """Returns `actions -> actions` in the units of the model; see `of`."""
  return of(norm_stats, 'actions', quantiles=quantiles).normalize


def read(
  checkpoint: str | pathlib.Path, asset: str | None = None
) -> dict[str, Any]:
  """The statistics that a checkpoint has.

  Args:
    checkpoint: its folder.
    asset: name of the data set; None if the folder has those of one only, or
      those of LeRobot.

  Returns:
    Statistics of 'state' and 'actions'. If the folder tells that actions are
    relative to the state, 'relative' of the latter has a truth value for each
    number.

  Raises:
    CheckpointError: if there are none of this name, or several.
  """
  root, found = pathlib.Path(checkpoint) / ASSETS, _assets(checkpoint)
  names = ', '.join(found) or 'none'
  if not found and asset is None:
    stored = lerobot_processors.read(checkpoint)
    if stored is not None:
      return stored
  if asset is None and len(found) != 1:
    raise weights.CheckpointError(
      f'{checkpoint} has statistics of {names} in {ASSETS}, and those of one '
      f'data set are needed: copy its {FILE} there, or name one of several.'
    )
  name = found[0] if asset is None else asset
  if name not in found:
    raise weights.CheckpointError(
      f'{checkpoint} has no statistics of {name!r}, but of {names}: name one '
      'of these.'
    )
  raw = weights.read_json(root / name / FILE)
  stats = raw.get('norm_stats') if isinstance(raw, Mapping) else None
  if not isinstance(stats, Mapping):
    raise weights.CheckpointError(
      f'{root / name / FILE} holds {raw!r:.60}, expected an object with '
      "'norm_stats': copy it again."
    )
  stats = dict(stats)
  actions = stats.get('actions')
  if raw.get(RELATIVE) and isinstance(actions, Mapping):
    told = raw[RELATIVE]
    width = lerobot_processors.width(actions)
    if not _is_mask(told, width):
      raise weights.CheckpointError(
        f'{root / name / FILE} has the {RELATIVE} {told!r:.60}, expected true '
        f'or false for each of {width} numbers of an action: mend it.'
      )
    stats['actions'] = {**actions, 'relative': told}
  return stats


def relative(
  checkpoint: str | None,
  chosen: relative_lib.RelativeActions | None = None,
) -> relative_lib.RelativeActions:
  """Which numbers of actions are relative to the state.

  Args:
    checkpoint: the folder of a model, whose statistics tell; None for random
      weights.
    chosen: an answer of one's own; None for that of the checkpoint.

  Returns:
    As `relative_actions.mask` takes it; of a checkpoint, whether each number
    is, and nothing if nothing tells, as without statistics or with those of
    several data sets.

  Raises:
    CheckpointError: if its statistics cannot be read.
  """
  if chosen is not None:
    return chosen
  if checkpoint is None:
    return ()
  num_sets = len(_assets(checkpoint))
  is_lerobot = not num_sets and lerobot_processors.read(checkpoint) is not None
  if num_sets != 1 and not is_lerobot:
    return ()
  return tuple(read(checkpoint).get('actions', {}).get('relative', ()))


def _assets(checkpoint: str | pathlib.Path) -> list[str]:
  """Names of the data sets of which openpi's files have statistics."""
  root = pathlib.Path(checkpoint) / ASSETS
  return sorted(
    # A name may have slashes, such as physical-intelligence/libero.
    x.parent.relative_to(root).as_posix()
    for x in root.rglob(FILE)
  )


def _is_mask(x: Any, width: int) -> bool:
  return isinstance(x, list) and [*map(type, x)] == [bool] * width


def write(folder: str | pathlib.Path, asset: str, norm_stats: Mapping):
  """Writes statistics into the folder of a checkpoint, as openpi has them.

  Those with a mode of LeRobot are left out, as openpi would read them in
  another one; see `lerobot_processors.write`.
  """
  if any('mode' in x for x in norm_stats.values() if isinstance(x, Mapping)):
    return
  stats, beside = dict(norm_stats), {}
  actions = stats.get('actions', {})
  if 'relative' in actions:
    beside[RELATIVE] = actions['relative']
    stats['actions'] = {k: x for k, x in actions.items() if k != 'relative'}
  path = pathlib.Path(folder) / ASSETS / asset / FILE
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps({'norm_stats': stats, **beside}, indent=2))


def _leading(x_A, like):
  """A vector in the rank of `like`."""
  return jnp.asarray(x_A).reshape((1,) * (like.ndim - 1) + (-1,))
