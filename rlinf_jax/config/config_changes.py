"""Compares the recipe of a run that goes on with the one it was begun with."""

from collections.abc import Iterable
import pathlib
from typing import NamedTuple

from rlinf_jax.config import config, config_bindings, config_errors

# Arguments that decide which parameters and which data a run has.
FIXED = frozenset(
  """
  seed workflow source policy optimizer env pretrain
  width layers heads kv_heads feed_forward vocabulary rope_theta
  """.split()
)


class Change(NamedTuple):
  """A binding whose value differs; None where it is not bound.

  Attributes:
    name: its left-hand side.
    before: its value when the run was begun.
    now: its value now.
    is_fixed: whether a run cannot go on with another value.
  """

  name: str
  before: config_bindings.Binding | None
  now: config_bindings.Binding | None
  is_fixed: bool

  def __str__(self):
    before, now = map(_shown, (self.before, self.now))
    return f'`{self.name}` was {before} and is {now} now'


def since_start(folder: pathlib.Path) -> list[Change]:
  """The changes of the recipe since the checkpoints of a run were written.

  Macros are listed in place of the parameters that read them. A run without a
  checkpoint begins anew, and so has none, unless it has made a model or
  demonstrations to start from, which are not made again.

  Raises:
    ValueError: if one of them is such that the run cannot go on; names those.
  """
  earlier = folder / 'config.gin'
  warm_start = folder / 'warm_start'
  has_checkpoint = any((folder / 'checkpoints').glob('[0-9]*'))
  is_begun = has_checkpoint or any(warm_start.glob('*'))
  if not earlier.exists() or not is_begun:
    return []
  with config_errors.rephrased(str(earlier)):
    changes = compare(earlier.read_text(), config.text())
  fixed = [str(change) for change in changes if change.is_fixed]
  if fixed and not has_checkpoint:
    raise ValueError(
      f'{folder} has no checkpoint yet, but what its run starts from, which '
      f'was made with other settings: {"; ".join(fixed)}. Delete {warm_start} '
      'to make it again, or copy it to another --workdir to start from it as '
      'it is, or give the settings as before.'
    )
  if fixed:
    raise ValueError(
      f'{folder} was begun with other settings: {"; ".join(fixed)}. It would '
      'be another run: give them as before, or choose another --workdir.'
    )
  return changes


def show(changes: Iterable[Change]) -> None:
  """Prints changes with which a run goes on."""
  for change in changes:
    print(f'Since the run was last started, {change}.', flush=True)


def compare(before: str, now: str) -> list[Change]:
  """The bindings of two gin texts that differ, by name."""
  old, new = map(config_bindings.by_key, (before, now))
  readers = _readers(old) | _readers(new)
  changes = []
  for key in old.keys() | new.keys():
    a, b = old.get(key), new.get(key)
    name = (a or b).name
    same = a is not None and b is not None and a.value == b.value
    if same or name == 'WORKDIR':
      continue
    scope, selector, argument = key
    macro = selector == config_bindings.MACRO
    read_as = readers.get(scope, set()) if macro else {argument}
    changes.append(Change(name, a, b, bool(read_as & FIXED)))
  return sorted(changes, key=lambda change: change.name)


def _readers(
  bindings: dict[config_bindings.Key, config_bindings.Binding],
) -> dict[str, set[str]]:
  """Macro → names of the arguments that read it, also through other macros."""
  readers: dict[str, set[str]] = {}
  waiting = [
    (reference, key[2])
    for key, binding in bindings.items()
    if key[1] != config_bindings.MACRO
    for reference in binding.references
  ]
  while waiting:
    reference, argument = waiting.pop()
    known = readers.setdefault(reference.scope, set())
    if reference.selector != config_bindings.MACRO or argument in known:
      continue
    known.add(argument)
    inner = bindings.get((reference.scope, config_bindings.MACRO, 'value'))
    waiting += [(x, argument) for x in (inner.references if inner else ())]
  return readers


def _shown(binding: config_bindings.Binding | None) -> str:
  """The value of a binding as a recipe writes it."""
  if binding is None:
    return 'not set'
  value = binding.value
  if not isinstance(value, config_bindings.Reference):
    return f'{value!r:.80}'
  if value.selector == config_bindings.MACRO:
    return f'%{value.scope}'
  scope = f'{value.scope}/' if value.scope else ''
  return f'@{scope}{value.selector}{"()" if value.evaluate else ""}'
