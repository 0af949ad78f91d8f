"""A plan: where each stage runs. Plain data, to be read, kept and edited."""

from collections.abc import Iterable, Mapping
import dataclasses
import json
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class Placement:
  """A set of devices seen as a mesh, e.g. devices 0-3 as `(('data', 4),)`.

  Attributes:
    devices: numbers of the process's devices.
    axes: names and sizes of the mesh; none for a single device.
    processes: that have as many of the devices each, in their order, where
      places are processes. Where they are threads, one has them all.
  """

  devices: tuple[int, ...] = (0,)
  axes: tuple[tuple[str, int], ...] = ()
  processes: int = 1

  def __post_init__(self):
    there = len(self.devices)
    if there > 1 and not self.axes:
      raise ValueError(
        f'A place of {there} devices needs mesh axes, such as '
        f"(('data', {there}),)."
      )
    need = math.prod(size for _, size in self.axes)
    if there != need:
      raise ValueError(
        f'A place with the axes {dict(self.axes)} needs {need} devices, and it '
        f'has {there}: change one of them.'
      )
    if len(set(self.devices)) < there:
      raise ValueError(f'A place of {self.devices} names a device twice.')
    if self.processes < 1:
      raise ValueError(
        f'A place cannot be of {self.processes} processes: give 1 or more.'
      )
    if there % self.processes:
      raise ValueError(
        f'{self.processes} processes cannot have as many of {there} devices '
        'each: make the number of processes a divisor of it.'
      )

  def __str__(self):
    """Devices, mesh and processes, for people."""
    count = len(self.devices)
    mesh = ' '.join(f'{axis}={size}' for axis, size in self.axes)
    said = f'{count} device{"s" * (count > 1)} {mesh}'.rstrip()
    many = f' in {self.processes} processes' * (self.processes > 1)
    return f'{said}{many}'


@dataclasses.dataclass(frozen=True)
class Plan:
  """Where, and how finely, every stage runs.

  Attributes:
    places: name of each group of devices; they have none in common but those
      in `shared_devices`.
    stages: the place of each stage.
    micro_batch: rows that a stage takes at once, which bounds its memory. A
      stage that is not named takes all the rows that it is given.
    pieces: in how many pieces a batch passes from stage to stage, so that they
      overlap.
    offload: stages whose own carried values (an optimizer's moments, a
      reference model) stay in host memory while other stages run.
    shared_devices: places that have devices in common. One place uses them at a
      time; of the places that wait, the one named first is served first.
  """

  places: dict[str, Placement]
  stages: dict[str, str]
  micro_batch: dict[str, int] = dataclasses.field(default_factory=dict)
  pieces: int = 1
  offload: tuple[str, ...] = ()
  shared_devices: tuple[str, ...] = ()

  def __post_init__(self):
    for stage, place in self.stages.items():
      if place not in self.places:
        raise ValueError(
          f'Stage {stage} is planned on place {place!r}, which is not one of '
          f'{sorted(self.places)}.'
        )
    for what, names in (
      ('a micro-batch', self.micro_batch),
      ('offloading', self.offload),
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
    taken = {}
    for name, place in self.places.items():
      for device in place.devices:
        other = taken.setdefault(device, name)
        if other != name and not {other, name} <= {*self.shared_devices}:
          raise ValueError(
            f'Device {device} is in the places {other!r} and {name!r}: a '
            'device belongs to one place; put the stages that share it there, '
            'or name both places in `shared_devices`, and they have it in turn.'
          )
    for name in self.shared_devices:
      if name not in self.places or not self._beside(name):
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

  def _beside(self, place: str) -> list[str]:
    """Other places that have one of its devices."""
    own = set(self.places[place].devices)
    return [
      other
      for other in self.shared_devices
      if other in self.places
      and other != place
      and own.intersection(self.places[other].devices)
    ]

  def lease_devices(self, place: str) -> tuple[int, ...]:
    """The devices that a place can only have together with others.

    Its own, those of the places that have some of these, and so on: one place
    of them all has its turn at a time. None of them if it shares none.
    """
    found, new = set(), [place] if place in self.shared_devices else []
    while new:
      found.update(new)
      new = [x for name in new for x in self._beside(name) if x not in found]
    devices = (self.places[name].devices for name in found)
    return tuple(sorted({i for some in devices for i in some}))

  def to_json(self) -> str:
    data = dataclasses.asdict(self)
    for place in data['places'].values():
      if place['processes'] == 1:  # Most plans have no use for the word.
        del place['processes']
    return json.dumps(data, indent=2)

  @classmethod
  def from_json(cls, text: str) -> 'Plan':
    """Reads a plan; the inverse of `to_json`.

    Raises:
      ValueError: as `parse`.
    """
    return parse(json.loads(text))


REST = '*'  # In a sketch: every stage that is not named.


def parse(sketch: Mapping[str, Any], stages: Iterable[str] = ()) -> Plan:
  """The plan that a person, or a file, has in mind.

    {'places': {'actor': {'devices': [0]}, 'learner': {'devices': [1]}},
     'stages': {'generate': 'actor', '*': 'learner'}, 'pieces': 4}

  Args:
    sketch: the fields of a plan. Without places there is one, on device 0; a
      sole place is that of all stages; else `*` stands for those not named.
    stages: names of all stages.

  Raises:
    ValueError: for a field that plans do not have, a stage that there is not,
      or a plan that cannot be.
  """
  _refuse_strange('plan', sketch, Plan)
  places = {
    name: _placement(place)
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
  return Plan(
    places,
    where,
    dict(sketch.get('micro_batch', {})),
    sketch.get('pieces', 1),
    tuple(sketch.get('offload', ())),
    tuple(sketch.get('shared_devices', ())),
  )


def _placement(sketch) -> Placement:
  """The place that a person, or a file, has in mind."""
  _refuse_strange('place', sketch, Placement)
  axes = tuple((axis, size) for axis, size in sketch.get('axes', ()))
  devices = tuple(sketch.get('devices', (0,)))
  return Placement(devices, axes, sketch.get('processes', 1))


def _refuse_strange(noun, sketch, kind):
  """Refuses fields that plans, or places, do not have."""
  known = [field.name for field in dataclasses.fields(kind)]
  strange = sorted(sketch.keys() - set(known))
  if strange:
    raise ValueError(f'A {noun} has no {strange}: it has {known}.')


def one_place(
  stages, placement: Placement = Placement(), micro_batch=None
) -> Plan:
  """The trivial plan: every stage on one place."""
  return Plan(
    {'all': placement},
    dict.fromkeys(stages, 'all'),
    micro_batch=dict(micro_batch or {}),
  )
