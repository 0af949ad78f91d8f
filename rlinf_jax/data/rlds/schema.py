"""The features of an RLDS data set, as its features.json describes them."""

from collections.abc import Iterator, Mapping
import pathlib
from typing import Any, NamedTuple

from rlinf_jax.data.episode_files import base
from stages.models.files import weights

STEPS = 'steps'
# Of the types of TensorFlow, those that `tf.train.Example` has lists for.
FLOATS = ('float16', 'bfloat16', 'float32', 'float64')
INTEGERS = ('bool', *(f'{u}int{n}' for u in ('', 'u') for n in (8, 16, 32, 64)))
INSTRUCTION = 'language_instruction'


class Schema(NamedTuple):
  """The features of each step of an episode.

  Attributes:
    features: pictures and numbers, by name; the parts of a name are separated
      by dots, as in 'observation.image'.
    keys: the keys of records that hold them, by the same names.
    instruction: the key that holds the instruction.
  """

  features: dict[str, base.Feature]
  keys: dict[str, str]
  instruction: str


def read(path: pathlib.Path) -> Schema:
  """The schema of a features.json.

  Features that are neither pictures, vectors nor single numbers are left out.

  Raises:
    ValueError: if it does not describe episodes of steps, or no instruction.
  """
  raw = weights.read_json(path)
  steps = _at(raw, 'featuresDict', 'features', STEPS, 'sequence', 'feature')
  if steps is None:
    raise ValueError(
      f'{path} has no {STEPS!r} of episodes: it does not describe an RLDS data '
      'set.'
    )
  features, keys, texts = {}, {}, {}
  for parts, leaf in _leaves(steps, ()):
    name, key = '.'.join(parts), '/'.join((STEPS, *parts))
    if 'text' in leaf:
      texts[name] = key
      continue
    feature = _feature(leaf)
    if feature is not None:
      features[name], keys[name] = feature, key
  named = [name for name in texts if name.split('.')[-1].endswith(INSTRUCTION)]
  if len(named) != 1:
    raise ValueError(
      f'{path} has the texts {", ".join(texts) or "none"}, and one named '
      f'{INSTRUCTION} is expected in each step.'
    )
  return Schema(features, keys, texts[named[0]])


def _at(x: Any, *keys: str) -> Any:
  """A nested value of a file; None without it."""
  for key in keys:
    x = x.get(key) if isinstance(x, Mapping) else None
  return x


def _leaves(x: Any, parts) -> Iterator[tuple[tuple[str, ...], Mapping]]:
  """Yields the names and the descriptions of features that have no others."""
  nested = _at(x, 'featuresDict', 'features')
  if isinstance(nested, Mapping):
    for name, part in nested.items():
      yield from _leaves(part, (*parts, str(name)))
  elif isinstance(x, Mapping):
    yield parts, x


def _feature(leaf: Mapping[str, Any]) -> base.Feature | None:
  """A feature that is read here; None for others."""
  picture, tensor = leaf.get('image'), leaf.get('tensor')
  shape = _shape(picture or tensor)
  if shape is None:
    return None
  if picture and len(shape) == 3 and shape[-1] == 3:
    return base.Feature('image', shape)
  dtype = _at(tensor, 'dtype')
  plain = _at(tensor, 'encoding') in (None, 'none')
  if plain and dtype in (*FLOATS, *INTEGERS) and len(shape) < 2:
    return base.Feature(
      'float32' if dtype in FLOATS else 'int64', shape or (1,)
    )
  return None


def _shape(described: Any) -> tuple[int, ...] | None:
  """A shape; None if it is not stated, or differs from step to step."""
  sizes = _at(described, 'shape', 'dimensions')
  if sizes is None:
    return () if isinstance(_at(described, 'shape'), Mapping) else None
  try:
    shape = tuple(map(int, sizes))
  except (TypeError, ValueError):
    return None
  return shape if all(n > 0 for n in shape) else None
