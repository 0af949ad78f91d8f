"""A plan, which places every stage: plain data to read, store and edit."""

from collections.abc import Iterable, Mapping
import dataclasses
import json
import math
from typing import Any, NamedTuple

import typeguard

STORE_ALL = 'none'  # The remat of a stage that stores all activations.


@dataclasses.dataclass(frozen=True)
class Placement:
  """A set of devices as a mesh, such as devices 0-3 as `(('data', 4),)`.

  Attributes:
    devices: indices of devices, from 0.
    axes: names, all different, and sizes of the mesh axes; none for a single
      device.
    processes: number of processes that divide the devices evenly, in order,
      where places are processes. It is 1 where places are threads.
  """

  devices: tuple[int, ...] = (0,)
  axes: tuple[tuple[str, int], ...] = ()
  processes: int = 1

  def __post_init__(self):
    count = len(self.devices)
    if count > 1 and not self.axes:
      raise ValueError(
        f'A place of {count} devices needs mesh axes, such as '
        f"(('data', {count}),)."
      )
    self._check_axes()
    need = math.prod(size for _, size in self.axes)
    if count != need:
      raise ValueError(
        f'A place with the axes {dict(self.axes)} needs {need} devices, and it '
        f'has {count}: change one of them.'
      )
    if len(set(self.devices)) < count:
      raise ValueError(f'A place of {self.devices} names a device twice.')
    if min(self.devices) < 0:
      raise ValueError(
        f'A place has device {min(self.devices)}: devices are numbered from 0.'
      )
    if self.processes < 1:
      raise ValueError(
        f'A place cannot be of {self.processes} processes: give 1 or more.'
      )
    if count % self.processes:
      raise ValueError(
        f'{self.processes} processes cannot divide {count} devices evenly: '
        'choose a number of processes that divides it.'
      )

  def _check_axes(self):
    for axis in self.axes:
      match axis:
        case (str(), int(size)) if size >= 1:
          continue
      raise ValueError(
        f'A place has the mesh axis {axis!r}: give a name and a whole number '
        "of 1 or more, such as ('data', 2)."
      )
    if len({name for name, _ in self.axes}) < len(self.axes):
      raise ValueError(
        f'A place has the axes {self.axes}, two of one name: give each axis '
        'once, with its whole size.'
      )

  def __str__(self):
    """Formats devices, mesh and processes."""
    count = len(self.devices)
    mesh = ' '.join(f'{axis}={size}' for axis, size in self.axes)
    text = f'{count} device{"s" * (count > 1)} {mesh}'.rstrip()
    many = f' in {self.processes} processes' * (self.processes > 1)
    return f'{text}{many}'


class Execution(NamedTuple):
  """The size of a stage's micro-batch, and what its backward pass stores.

  Attributes:
    rows: of a micro-batch; None for all that it is given.
    remat: as in `Plan.remat`.
  """

  rows: int | None = None
  remat: str = STORE_ALL


# The nodes of a flow in some order, by number; a loop is a pair of its number
# and the order of its body.
Order = tuple['int | tuple[int, Order]', ...]


@dataclasses.dataclass(frozen=True)
class Plan:
  """The place of every stage, and how finely its batch is cut.

  Attributes:
    places: the devices of each place, by name. Places have no devices in common
      unless they are in `shared_devices`.
    stages: the place of each stage.
    micro_batch: rows that a stage takes at once, which bounds its memory. A
      stage that is not named takes all the rows that it is given.
    pieces: number of pieces in which a batch passes from stage to stage, so
      that stages overlap.
    offload: stages whose own carried values (an optimizer's moments, a
      reference model) stay in host memory while other stages run.
    shared_devices: places that have devices in common. One place uses them at a
      time; of the places that wait, the one named first is served first.
    order: the order of the nodes of a step, cut into pieces: that of the search
      that found the plan. Empty where lowering chooses an order that does not
      depend on costs. No order changes what a step computes.
    remat: of a stage that differentiates a model, the activations that are
      stored for its backward pass, as a policy of `stages.remat`. A stage that
      is not named stores all, or what its model is bound to.
    compiler_options: of a stage, options of XLA's compiler by name, in place of
      all that a run gives it by default. They may change rounding and speed,
      and nothing else.
  """

  places: dict[str, Placement]
  stages: dict[str, str]
  micro_batch: dict[str, int] = dataclasses.field(default_factory=dict)
  pieces: int = 1
  offload: tuple[str, ...] = ()
  shared_devices: tuple[str, ...] = ()
  order: Order = ()
  remat: dict[str, str] = dataclasses.field(default_factory=dict)
  compiler_options: dict[str, dict[str, Any]] = dataclasses.field(
    default_factory=dict
  )

  def __post_init__(self):
    for stage, place in self.stages.items():
      if place not in self.places:
        raise ValueError(
          f'Stage {stage} is planned on place {place!r}, which is not one of '
          f'{sorted(self.places)}.'
        )
    for what, names in (
      ('a micro-batch', self.micro_batch),
      ('remat', self.remat),
      ('offloading', self.offload),
      ('compiler options', self.compiler_options),
    ):
      for stage in names:
        if stage not in self.stages:
          raise ValueError(
            f'The plan gives {what} for {stage!r}, which is not one of its '
            f'stages {sorted(self.stages)}.'
          )
    if self.pieces < 1:
      raise ValueError(
        f'A batch cannot pass in {self.pieces} pieces: give 1 or more.'
      )
    self._check_devices()

  def _check_devices(self):
    devices = [place.devices for place in self.places.values()]
    if not self.shared_devices and (
      len(set().union(*devices)) == sum(map(len, devices))
    ):
      return  # A search makes many plans of a thousand devices.
    taken = {}
    for name, place in self.places.items():
      for device in place.devices:
        other = taken.setdefault(device, name)
        if other != name and not {other, name} <= {*self.shared_devices}:
          raise ValueError(
            f'Device {device} is in the places {other!r} and {name!r}: a '
            'device belongs to one place. Put the stages that use it there, '
            'or name both places in `shared_devices` to let them take turns.'
          )
    for name in self.shared_devices:
      if name not in self.places or not self._sharing_with(name):
        raise ValueError(
          f'The plan lets {name!r} share devices, and no other place of '
          f'{sorted(self.places)} has one of its devices: leave it out of '
          '`shared_devices`.'
        )
      if self.places[name].processes > 1:
        raise ValueError(
          f'The plan lets {name!r} share devices, and it is of '
          f'{self.places[name].processes} processes: only a place of one can.'
        )

  def _sharing_with(self, place: str) -> list[str]:
    """Returns the other places that have one of its devices."""
    own = set(self.places[place].devices)
    return [
      other
      for other in self.shared_devices
      if other in self.places
      and other != place
      and own.intersection(self.places[other].devices)
    ]

  def lease_devices(self, place: str) -> tuple[int, ...]:
    """Returns the devices that a place acquires together; none if unshared.

    These are its own devices, those of the places that share any of them, and
    so on. Only one of all these places uses the devices at a time.
    """
    found, new = set(), [place] if place in self.shared_devices else []
    while new:
      found.update(new)
      new = [
        x for name in new for x in self._sharing_with(name) if x not in found
      ]
    devices = (self.places[name].devices for name in found)
    return tuple(sorted({i for some in devices for i in some}))

  def execution(self, stage: str) -> Execution:
    """Returns how a stage runs on its place."""
    remat = self.remat.get(stage, STORE_ALL)
    return Execution(self.micro_batch.get(stage), remat)

  def to_json(self) -> str:
    data = dataclasses.asdict(self)
    for place in data['places'].values():
      if place['processes'] == 1:  # Keeps the JSON of most plans short.
        del place['processes']
    order = data.pop('order')
    text = json.dumps(data, indent=2)
    if not order:
      return text
    # In one line: it is as long as the step, and not written by hand.
    return f'{text[:-2]},\n  "order": {json.dumps(order)}\n}}'

  @classmethod
  def from_json(cls, text: str) -> 'Plan':
    """Reads a plan from JSON; the inverse of `to_json`.

    Raises:
      ValueError: as in `parse`.
    """
    return parse(json.loads(text))


# The types of a sketch's fields, in words, with an example.
_Names = list[str] | tuple[str, ...]
_Pair = list[str | int] | tuple[str, int]
_PLAN_TYPES = {
  'places': (
    Mapping[str, Mapping[str, Any]],
    "a dictionary of places, such as {'learner': {'devices': [0]}}",
  ),
  'stages': (
    Mapping[str, str],
    "the name of a place for each stage, such as {'*': 'learner'}",
  ),
  'micro_batch': (
    Mapping[str, int],
    "a number of rows for each stage, such as {'gradient': 8}",
  ),
  'pieces': (int, 'a whole number, such as 4'),
  'offload': (_Names, "a list of stages, such as ['apply']"),
  'shared_devices': (_Names, "a list of places, such as ['actor', 'learner']"),
  'order': (list | tuple, 'a list that a search has written'),
  'remat': (
    Mapping[str, str],
    "a policy for each stage, such as {'gradient': 'nothing_saveable'}",
  ),
  'compiler_options': (
    Mapping[str, Mapping[str, bool | int | float | str]],
    "XLA's options for each stage, such as "
    "{'*': {'xla_backend_optimization_level': 1}}",
  ),
}
_PLACE_TYPES = {
  'devices': (
    list[int] | tuple[int, ...],
    'a list of device numbers, such as [0, 1]',
  ),
  'axes': (
    list[_Pair] | tuple[_Pair, ...],
    "a list of pairs, such as [['data', 2]]",
  ),
  'processes': (int, 'a whole number, such as 2'),
}
REST = '*'  # In a sketch, stands for every stage that is not named.


def parse(sketch: Mapping[str, Any], stages: Iterable[str] = ()) -> Plan:
  """Completes the sketch of a plan, from a gin binding or a file.

    {'places': {'actor': {'devices': [0]}, 'learner': {'devices': [1]}},
     'stages': {'generate': 'actor', '*': 'learner'}, 'pieces': 4}

  Args:
    sketch: the fields of a plan. Without places there is a single one, on
      device 0. A single place has all stages; otherwise `*` stands for the
      stages that are not named. So it does in `compiler_options`.
    stages: names of all stages.

  Raises:
    ValueError: for an unknown field, a value of another type, an unknown stage,
      or an invalid plan.
  """
  check_fields(sketch)
  places = {
    name: _placement(name, place)
    for name, place in sketch.get('places', {'all': {}}).items()
  }
  where = dict(sketch.get('stages', {}))
  rest = where.pop(REST, next(iter(places)) if len(places) == 1 else None)
  stages = tuple(stages)
  unknown = sorted(where.keys() - set(stages))
  if stages and unknown:
    raise ValueError(
      f'The plan places {unknown}, which is not among the stages '
      f'{sorted(stages)}.'
    )
  if rest is not None:
    where = dict.fromkeys(stages, rest) | where
  options = {k: dict(v) for k, v in sketch.get('compiler_options', {}).items()}
  if REST in options:
    options = dict.fromkeys(stages or where, options.pop(REST)) | options
  return Plan(
    places,
    where,
    dict(sketch.get('micro_batch', {})),
    sketch.get('pieces', 1),
    tuple(sketch.get('offload', ())),
    tuple(sketch.get('shared_devices', ())),
    _order(sketch.get('order', ())),
    dict(sketch.get('remat', {})),
    options,
  )


def check_fields(sketch: Mapping[str, Any]):
  """Refuses unknown fields of a sketch, and values of other types."""
  _check_fields('plan', sketch, _PLAN_TYPES)


def _order(sketch) -> Order:
  """Reads an order from lists of numbers and of pairs."""
  return tuple(map(_ordered, sketch))


def _ordered(item):
  match item:
    case int():
      return item
    case (int(loop), list(body) | tuple(body)):
      return loop, _order(body)
  raise ValueError(
    f'The order of a plan has {item!r:.60}, which is neither the number of a '
    'node nor a pair of one and the order of its body: leave `order` out.'
  )


def _placement(name: str, sketch) -> Placement:
  """Completes the sketch of a placement."""
  _check_fields(f'place {name!r}', sketch, _PLACE_TYPES)
  axes = tuple(map(tuple, sketch.get('axes', ())))
  devices = tuple(sketch.get('devices', (0,)))
  return Placement(devices, axes, sketch.get('processes', 1))


def _check_fields(noun: str, sketch, types: Mapping[str, tuple[Any, str]]):
  """Refuses unknown fields, and values of other types."""
  if not isinstance(sketch, Mapping):
    raise ValueError(f'A {noun} is {sketch!r:.80}: give a dictionary.')
  unknown = sorted(map(str, sketch.keys() - types.keys()))
  if unknown:
    raise ValueError(f'A {noun} has no {unknown}: it has {[*types]}.')
  for field, value in sketch.items():
    try:
      typeguard.check_type(
        value,
        types[field][0],
        collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS,
      )
    except typeguard.TypeCheckError:
      raise ValueError(
        f'A {noun} has {field} {value!r:.60}: give {types[field][1]}.'
      ) from None


def one_place(
  stages, placement: Placement = Placement(), micro_batch=None
) -> Plan:
  """Returns the plan with every stage on one place."""
  return Plan(
    {'all': placement},
    dict.fromkeys(stages, 'all'),
    micro_batch=dict(micro_batch or {}),
  )
