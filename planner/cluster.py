"""Devices and the links between them, as numbers.

Plain data: no JAX, JSON in, JSON out. The files in `gin_configs/clusters` say
where each number comes from.
"""

from collections.abc import Mapping
import dataclasses
import json


@dataclasses.dataclass(frozen=True)
class Device:
  """An accelerator, or a share of a processor that is used as one.

  Attributes:
    name: shown in reports.
    matmul_flops: peak operations per second of dense matrix products, by type
      of the operands.
    vector_flops: peak operations per second of all other arithmetic.
    memory_bytes: size of the device's memory.
    memory_bandwidth: bytes per second to and from the device's memory.
    host_bandwidth: bytes per second to and from the host's memory.
    launch_seconds: time until a call of a compiled function starts.
    kernel_gap_seconds: time between the end of a kernel and the start of the
      next.
    host_latency_seconds: time until the first byte of an array moves to or from
      the host's memory; None if it is `launch_seconds`.
    platform: JAX's name of its kind, such as 'tpu', by which models choose
      kernels; None for the kind that the process that plans runs on.
    clock_hertz: cycles per second, to read the estimates of its compiler in;
      None where that has none.
  """

  name: str
  matmul_flops: Mapping[str, float]
  vector_flops: float
  memory_bytes: float
  memory_bandwidth: float
  host_bandwidth: float
  launch_seconds: float = 0.0
  kernel_gap_seconds: float = 0.0
  host_latency_seconds: float | None = None
  platform: str | None = None
  clock_hertz: float | None = None

  def __post_init__(self):
    rates = {**self.matmul_flops, **{k: getattr(self, k) for k in RATES}}
    wrong = [name for name, rate in rates.items() if not rate > 0]
    if wrong or not self.matmul_flops:
      raise ValueError(
        f'The rates of a device must be positive: {self.name} has '
        f'{wrong or "matmul_flops"} of {[rates[name] for name in wrong]}.'
      )

  def peak(self, dtype: str) -> float:
    """Returns the operations per second of matrix products of a type.

    A type that is not listed is as slow as the slowest listed type.
    """
    return self.matmul_flops.get(dtype, min(self.matmul_flops.values()))


RATES = ('vector_flops', 'memory_bytes', 'memory_bandwidth', 'host_bandwidth')


@dataclasses.dataclass(frozen=True)
class Link:
  """The connection between two devices.

  Attributes:
    latency_seconds: time until the first byte arrives.
    bandwidth: bytes per second that a device sends while it receives as many.
  """

  latency_seconds: float
  bandwidth: float

  def __post_init__(self):
    if not (self.latency_seconds >= 0 and self.bandwidth > 0):
      raise ValueError(
        f'A link has a latency of {self.latency_seconds} seconds and a '
        f'bandwidth of {self.bandwidth} bytes per second: give 0 or more, and '
        'more than 0.'
      )

  def seconds(self, size: float, messages: float = 1.0) -> float:
    """Returns the time of `size` bytes in consecutive messages."""
    return messages * self.latency_seconds + size / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Cluster:
  """Devices of one kind, grouped in nodes.

  Attributes:
    device: each of the devices.
    num_devices: number of devices.
    devices_per_node: node n has the devices from n · devices_per_node to
      (n + 1) · devices_per_node - 1.
    intra_node: the links within a node.
    inter_node: the links between devices on different nodes.
    memory_reserve: fraction of each device's memory that plans leave free for
      the compiler and the runtime.
    shared_cores: cores of the processor that all devices are shares of, as many
      as the devices can keep busy; None where each device is a processor.
    contention: how many times as long a call takes when every shared core is
      busy as when only its own core is: cores share memory bandwidth, caches
      and arithmetic units.
    scatters_sums: whether a sum that is scattered reaches each device in parts;
      otherwise each receives the whole sum, twice as many bytes, as XLA has it
      on some TPUs.
    windows_products: whether a product with a weight that devices share is
      computed in steps while parts pass along the ring, as XLA has it on TPUs:
      more than four devices, n, then send n + 1 parts each instead of n - 1.
    gathers_weights: whether gradients on a mesh of rows alone are compiled with
      options by which they gather whole weights instead.
    topology: name of these devices for XLA's compilers, such as 'v5p:4x4x4';
      None if no plan is compiled for them. See
      `rlinf_jax.planning.compiled.topology`.
  """

  device: Device
  num_devices: int
  devices_per_node: int
  intra_node: Link
  inter_node: Link
  memory_reserve: float = 0.1
  shared_cores: int | None = None
  contention: float = 1.0
  scatters_sums: bool = True
  windows_products: bool = False
  gathers_weights: bool = False
  topology: str | None = None

  def __post_init__(self):
    devices, per_node = self.num_devices, self.devices_per_node
    if devices < 1 or per_node < 1:
      raise ValueError(
        f'A cluster of {devices} devices, {per_node} to a node: it needs '
        'at least one of each.'
      )
    if devices > per_node and devices % per_node:
      raise ValueError(
        f'{devices} devices are no whole number of nodes of {per_node}: '
        'change one of them.'
      )
    if not 0 <= self.memory_reserve < 1:
      raise ValueError(
        f'A memory reserve of {self.memory_reserve} is not a fraction: give 0 '
        'or more, and less than 1.'
      )
    cores = self.shared_cores
    if cores is not None and cores < 1 or self.contention < 1:
      raise ValueError(
        f'Devices that share {cores} cores with a contention of '
        f'{self.contention}: give 1 or more of each.'
      )

  @property
  def capacity(self) -> float:
    """Returns the bytes of a device that plans may use."""
    return self.device.memory_bytes * (1 - self.memory_reserve)

  def slowdown(self, busy: int, contention: float | None = None) -> float:
    """Returns how many times as long a call takes while devices are busy.

    The slowdown rises linearly from one busy core to all of them; more busy
    devices than cores take turns.

    Args:
      busy: number of busy devices, including those of the call.
      contention: that of this call, where it was measured.
    """
    if self.shared_cores is None or busy < 2:
      return 1.0
    contention = self.contention if contention is None else contention
    with_others = min(busy, self.shared_cores) - 1
    rise = (contention - 1) * with_others / max(self.shared_cores - 1, 1)
    return (1 + rise) * max(1.0, busy / self.shared_cores)

  def host_seconds(self, size: float, devices: int = 1) -> float:
    """Returns the time of an array to or from the host's memory.

    Devices that share cores share the memory, too: each waits for the others.

    Args:
      size: bytes on each device.
      devices: number of devices that move as many bytes at once.
    """
    device = self.device
    latency = device.host_latency_seconds
    if latency is None:
      latency = device.launch_seconds
    return latency + self.slowdown(devices) * size / device.host_bandwidth

  def link(self, devices) -> Link:
    """Returns the slowest link among some devices."""
    nodes = {device // self.devices_per_node for device in devices}
    return self.intra_node if len(nodes) < 2 else self.inter_node

  def to_json(self) -> str:
    return json.dumps(dataclasses.asdict(self), indent=2)

  @classmethod
  def from_json(cls, text: str) -> 'Cluster':
    """Reads a cluster from JSON.

    Raises:
      ValueError: for a field that is unknown or missing, or no dictionary.
    """
    return _read(cls, json.loads(text))


PARTS = {'device': Device, 'intra_node': Link, 'inter_node': Link}


def _read(kind, plain):
  """Builds a dataclass, and those in it, from dictionaries of their fields."""
  fields = dataclasses.fields(kind)
  known = [field.name for field in fields]
  if not isinstance(plain, dict):
    raise ValueError(
      f'A {kind.__name__} is {plain!r:.40}: give a dictionary of {known}.'
    )
  needed = {f.name for f in fields if f.default is dataclasses.MISSING}
  wrong = {
    'has no': sorted(plain.keys() - set(known)),
    'needs': sorted(needed - plain.keys()),
  }
  for what, names in wrong.items():
    if names:
      raise ValueError(f'A {kind.__name__} {what} {names}: it has {known}.')
  parts = {
    name: _read(PARTS[name], plain[name]) for name in PARTS if name in plain
  }
  return kind(**plain | parts)
