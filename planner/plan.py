"""A plan: where each stage runs. Plain data, to be read, kept and edited."""

import dataclasses
import json
import math


@dataclasses.dataclass(frozen=True)
class Placement:
  """A set of devices seen as a mesh, e.g. devices 0-3 as `(('data', 4),)`.

  Attributes:
    devices: numbers of the process's devices.
    axes: names and sizes of the mesh; none for a single device.
  """

  devices: tuple[int, ...] = (0,)
  axes: tuple[tuple[str, int], ...] = ()

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


@dataclasses.dataclass(frozen=True)
class Plan:
  """Where, and how finely, every stage runs.

  Attributes:
    places: name of each group of devices.
    stages: the place of each stage.
    rows: rows that a stage takes at once; a stage not named takes all.
  """

  places: dict[str, Placement]
  stages: dict[str, str]
  rows: dict[str, int] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    for stage, place in self.stages.items():
      if place not in self.places:
        raise ValueError(
          f'Stage {stage} is planned on place {place!r}, which is not one of '
          f'{sorted(self.places)}.'
        )
    for stage in self.rows:
      if stage not in self.stages:
        raise ValueError(
          f'The plan gives rows for {stage!r}, which is not one of its stages '
          f'{sorted(self.stages)}.'
        )

  def to_json(self) -> str:
    return json.dumps(dataclasses.asdict(self), indent=2)

  @classmethod
  def from_json(cls, text: str) -> 'Plan':
    plan = json.loads(text)
    places = {
      name: Placement(
        tuple(place['devices']), tuple((a, n) for a, n in place['axes'])
      )
      for name, place in plan['places'].items()
    }
    return cls(places, plan['stages'], plan['rows'])


def one_place(stages, placement: Placement = Placement(), rows=None) -> Plan:
  """The trivial plan: every stage on one place."""
  return Plan(
    {'all': placement}, dict.fromkeys(stages, 'all'), dict(rows or {})
  )
