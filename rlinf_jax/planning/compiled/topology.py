"""Named topologies: devices that are not here, for which XLA can compile.

  v5p:4x4x4           TPU v5p chips along x, y and z
  v5e:4x4, v6e:4x4    TPU v5e or v6e chips along x and y
  h100:1x8x8, h200:…  slices × nodes of a slice × GPUs of a node
  cpu:8               virtual devices of this process

TPUs need the package libtpu. GPUs need JAX's CUDA plugin, and NVIDIA's
assembler and device library. None needs an accelerator.
"""

from collections.abc import Mapping
import importlib.resources
import importlib.util
import math
import os
import re
import string
from typing import NamedTuple

import jax

from planner import cluster as cluster_lib

EXTRA = "pip install 'rlinf-jax[aot]'"
# libtpu asks for the type of this machine. The named topology overrules it.
TPU_TYPES = {'v5p': 'v5p-8', 'v5e': 'v5litepod-8', 'v6e': 'v6e-8'}
# The fields in which the GPUs of `hopper.txtpb` differ.
GPUS: Mapping[str, Mapping[str, str | int]] = {
  'h100': {
    'name': 'NVIDIA H100 80GB HBM3',
    'memory_bytes': 84942979072,
    'memory_bandwidth': 3352320000000,
  },
  'h200': {
    'name': 'NVIDIA H200 141GB HBM3e',
    'memory_bytes': 151397597184,
    'memory_bandwidth': 4800000000000,
  },
}
DIMENSIONS = {'v5p': 3, 'v5e': 2, 'v6e': 2, 'h100': 3, 'h200': 3, 'cpu': 1}
# Modules that compiling for a GPU needs, and the packages that they come from.
CUDA_MODULES = {
  'jax_plugins.xla_cuda12': 'jax-cuda12-pjrt',
  'jax_cuda12_plugin': 'jax-cuda12-plugin',
  'nvidia.cuda_nvcc': 'nvidia-cuda-nvcc-cu12',
}


class Topology(NamedTuple):
  """A kind of device, and the shape in which devices are connected.

  Attributes:
    kind: 'v5p', 'v5e', 'v6e', 'h100', 'h200' or 'cpu'.
    shape: number of devices along each dimension of the interconnect.
  """

  kind: str
  shape: tuple[int, ...]

  @property
  def num_devices(self) -> int:
    return math.prod(self.shape)

  def __str__(self):
    return f'{self.kind}:{"x".join(map(str, self.shape))}'


def parse(name: str) -> Topology:
  """Reads the name of a topology, such as 'v5p:4x4x4'.

  Raises:
    ValueError: if there is no such topology.
  """
  match = re.fullmatch(r'(\w+):([1-9]\d*(?:x[1-9]\d*)*)', name)
  if match and match[1] in DIMENSIONS:
    shape = tuple(map(int, match[2].split('x')))
    if len(shape) == DIMENSIONS[match[1]]:
      return Topology(match[1], shape)
  raise ValueError(
    f'{name!r} is not a topology: name a kind and its shape, such as '
    "'v5p:4x4x4', 'v5e:4x4', 'v6e:4x4', 'h100:1x1x8', 'h200:1x1x8' (slices, "
    "nodes, GPUs) or 'cpu:8'."
  )


def of_cluster(cluster: cluster_lib.Cluster) -> Topology:
  """Returns the topology that a cluster names.

  Raises:
    ValueError: if it names none, or one of another number of devices.
  """
  if cluster.topology is None:
    raise ValueError(
      'The cluster names no topology to compile for: bind '
      "cluster.Cluster.topology, such as 'v5p:4x4x4' or 'h100:1x1x8'."
    )
  topology = parse(cluster.topology)
  if topology.num_devices != cluster.num_devices:
    raise ValueError(
      f'The topology {topology} has {topology.num_devices} devices, and the '
      f'cluster {cluster.num_devices}: change cluster.Cluster.topology or '
      'num_devices.'
    )
  return topology


def prepare(topology: Topology):
  """Sets what the compiler of a topology reads as it is loaded.

  It must be called before JAX has computed anything. Tracing then runs on the
  processor, even if accelerators are here.

  Raises:
    ImportError: if a package is missing.
  """
  missing = missing_package(topology.kind)
  if missing:
    raise ImportError(
      f'To compile for {topology}, the package {missing} is needed, and it is '
      f'not installed: {EXTRA}.'
    )
  jax.config.update('jax_platforms', 'cpu')
  os.environ['JAX_PLATFORMS'] = 'cpu'
  if topology.kind == 'cpu':
    jax.config.update('jax_num_cpu_devices', topology.num_devices)
  elif topology.kind in TPU_TYPES:
    os.environ.setdefault('TPU_ACCELERATOR_TYPE', TPU_TYPES[topology.kind])
    os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
    # Without these, libtpu asks a metadata server that does not exist, and a
    # second process aborts at the lockfile of the first.
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
  else:
    found = importlib.util.find_spec('nvidia.cuda_nvcc')
    flags = [
      os.environ.get('XLA_FLAGS', ''),
      '--xla_gpu_autotune_level=0',  # Tuning would run kernels.
      # cuBLAS multiplies: without tuning, some kernels of Triton's do not
      # compile.
      '--xla_gpu_enable_triton_gemm=false',
      # The folder of bin/ptxas and nvvm/libdevice.
      f'--xla_gpu_cuda_data_dir={next(iter(found.submodule_search_locations))}',
    ]
    os.environ['XLA_FLAGS'] = ' '.join(flags).strip()


def devices(topology: Topology) -> list[jax.Device]:
  """Returns the devices of a topology, after `prepare`.

  They can be compiled for, but arrays cannot be put on them (but for 'cpu').

  Raises:
    ValueError: if the compiler does not know the shape.
  """
  # Loads plugins, so it is not imported above.
  from jax.experimental import topologies

  kind = topology.kind
  if kind == 'cpu':
    devices = jax.devices('cpu')
    if len(devices) < topology.num_devices:
      raise ValueError(
        f'{topology} needs {topology.num_devices} virtual devices, and this '
        f'process has {len(devices)}: set JAX_NUM_CPU_DEVICES='
        f'{topology.num_devices}.'
      )
    return devices[: topology.num_devices]
  try:
    if kind in TPU_TYPES:
      description = topologies.get_topology_desc(str(topology), platform='tpu')
    else:
      description = topologies.get_topology_desc(
        str(topology),
        platform='cuda',
        target_config=gpu_target(kind),
        topology='x'.join(map(str, topology.shape)),
      )
  except jax.errors.JaxRuntimeError as error:
    raise ValueError(
      f'The compiler of {kind} refuses the topology {topology}: {error}'
    ) from error
  return list(description.devices)


def gpu_target(kind: str) -> str:
  """Returns the description of a GPU that XLA compiles for, as a text proto."""
  folder = importlib.resources.files('rlinf_jax.planning.compiled')
  text = (folder / 'hopper.txtpb').read_text(encoding='utf-8')
  return string.Template(text).substitute(GPUS[kind])


def missing_package(kind: str) -> str | None:
  """Returns the first package that compiling for a kind needs and lacks."""
  needed = {'libtpu': 'libtpu'} if kind in TPU_TYPES else {}
  needed = CUDA_MODULES if kind in GPUS else needed
  for module, package in needed.items():
    try:
      found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # Its parent package is missing, too.
      found = None
    if found is None:
      return package
  return None
