"""Devices and the links between them, as numbers.

Plain data: no JAX, JSON in, JSON out. `gin_configs/clusters` says where each
number comes from.
"""

from collections.abc import Mapping
import dataclasses
import json


@dataclasses.dataclass(frozen=True)
class Device:
  """An accelerator, or a share of a processor that is used as one.

  Attributes:
    name: what people call it.
    flops: operations per second of dense matrix products at most, by type of
      the operands.
    vector: operations per second of all other arithmetic at most.
    memory: bytes.
    bandwidth: bytes per second to and from its memory.
    host: bytes per second to and from its host's memory.
    launch: seconds until a call of a compiled function begins.
    kernel: seconds from a kernel's end to the next one's beginning.
  """

  name: str
  flops: Mapping[str, float]
  vector: float
  memory: float
  bandwidth: float
  host: float
  launch: float = 0.0
  kernel: float = 0.0

  def __post_init__(self):
    rates = {**self.flops, **{k: getattr(self, k) for k in RATES}}
    wrong = [name for name, rate in rates.items() if not rate > 0]
    if wrong or not self.flops:
      raise ValueError(
        f'A device does more than nothing in a second: {self.name} has '
        f'{wrong or "flops"} of {[rates[name] for name in wrong]}.'
      )

  def peak(self, dtype: str) -> float:
    """Operations per second of products of this type.

    A type that is not named goes at the speed of the slowest that is.
    """
    return self.flops.get(dtype, min(self.flops.values()))


RATES = ('vector', 'memory', 'bandwidth', 'host')


@dataclasses.dataclass(frozen=True)
class Link:
  """What connects two devices.

  Attributes:
    latency: seconds until the first byte arrives.
    bandwidth: bytes per second that a device sends while it receives as many.
  """

  latency: float
  bandwidth: float

  def seconds(self, size: float, messages: float = 1.0) -> float:
    """Of so many bytes, in so many messages one after the other."""
    return messages * self.latency + size / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Cluster:
  """Devices of one kind.

  Attributes:
    device: each of them.
    devices: how many.
    node: how many are on a node; devices n · node to (n + 1) · node - 1 are.
    within: the links of a node.
    between: the links of devices on different nodes.
    reserve: share of each device's memory that plans leave alone, for what the
      compiler and the runtime need besides.
    cores: of the processor that all devices are shares of, as many as they can
      keep busy; None where each is a processor of its own.
    crowded: how many times as long a call takes while every core has one, as
      where only its own has: they share memory, caches, or arithmetic units.
  """

  device: Device
  devices: int
  node: int
  within: Link
  between: Link
  reserve: float = 0.1
  cores: int | None = None
  crowded: float = 1.0

  def __post_init__(self):
    if self.devices < 1 or self.node < 1:
      raise ValueError(
        f'A cluster of {self.devices} devices, {self.node} to a node: it needs '
        'at least one of each.'
      )
    if self.devices > self.node and self.devices % self.node:
      raise ValueError(
        f'{self.devices} devices are no whole number of nodes of {self.node}: '
        'change one of them.'
      )
    if not 0 <= self.reserve < 1:
      raise ValueError(
        f'A reserve of {self.reserve} is no share of memory: give 0 or more, '
        'and less than 1.'
      )
    if self.cores is not None and self.cores < 1 or self.crowded < 1:
      raise ValueError(
        f'Devices that share {self.cores} cores and take {self.crowded} times '
        'as long on all of them: give 1 or more of each.'
      )

  @property
  def capacity(self) -> float:
    """Bytes of a device that plans may use."""
    return self.device.memory * (1 - self.reserve)

  def slowed(self, busy: int, crowded: float | None = None) -> float:
    """How many times as long a call takes while so many devices are busy.

    From one busy core to all it rises in a line; what is more than the cores
    takes turns.

    Args:
      busy: devices, that of the call included.
      crowded: of this call, where that is known.
    """
    if self.cores is None or busy < 2:
      return 1.0
    crowded = self.crowded if crowded is None else crowded
    with_others = min(busy, self.cores) - 1
    rise = (crowded - 1) * with_others / max(self.cores - 1, 1)
    return (1 + rise) * max(1.0, busy / self.cores)

  def link(self, devices) -> Link:
    """The slowest link among some devices."""
    nodes = {device // self.node for device in devices}
    return self.within if len(nodes) < 2 else self.between

  def to_json(self) -> str:
    return json.dumps(dataclasses.asdict(self), indent=2)

  @classmethod
  def from_json(cls, text: str) -> 'Cluster':
    """Reads a cluster, and refuses what is not one.

    Raises:
      ValueError: for a field that clusters do not have, or lack.
    """
    plain = json.loads(text)
    for key, kind in PARTS.items():
      if key in plain:
        plain[key] = _read(kind, plain[key])
    return _read(cls, plain)


PARTS = {'device': Device, 'within': Link, 'between': Link}


def _read(kind, plain):
  fields = dataclasses.fields(kind)
  known = [field.name for field in fields]
  needed = {f.name for f in fields if f.default is dataclasses.MISSING}
  wrong = {
    'has no': sorted(plain.keys() - set(known)),
    'needs': sorted(needed - plain.keys()),
  }
  for what, names in wrong.items():
    if names:
      raise ValueError(f'A {kind.__name__} {what} {names}: it has {known}.')
  return kind(**plain)
