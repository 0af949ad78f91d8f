"""Devices and environment variables of a plan's processes, from Ray."""

import collections
from collections.abc import Mapping, Sequence
import os
import sys
from typing import Any, NamedTuple

import jax
import ray
from ray import util
from ray.util import scheduling_strategies as scheduling

from rlinf_jax.runtime.ray import actor as actor_lib

READY = 120.0  # Seconds until the placement group is ready.
KINDS = ('TPU', 'GPU', 'CPU')  # Devices that Ray counts: the first it has.
# Settings of JAX that a process must share to compute the same bits.
SETTINGS = (
  'jax_enable_x64',
  'jax_default_matmul_precision',
  'jax_numpy_rank_promotion',
  'jax_compilation_cache_dir',
  'jax_platforms',
  'jax_threefry_partitionable',
)


class Reservation(NamedTuple):
  """Devices that Ray has reserved for all processes of a plan.

  Attributes:
    group: Ray's placement group.
    bundle: index of the group's bundle that each process is in.
    needs: resources of each process, by kind.
  """

  group: Any
  bundle: dict[str, int]
  needs: dict[str, dict[str, float]]


def device_kind() -> str:
  """The kind of the devices that Ray gives to places."""
  available = ray.cluster_resources()
  return next(kind for kind in KINDS if available.get(kind))


def reserve(plan, processes: Mapping[str, actor_lib.Process]) -> Reservation:
  """Reserves devices for all processes together; blocks until they are free.

  Processes that share devices are in one bundle, and so on one machine.

  Args:
    plan: with the devices of its places.
    processes: by name.

  Raises:
    ValueError: if Ray has too few devices, or cannot share them.
  """
  kind = device_kind()
  sharing = collections.defaultdict(list)
  for name, process in processes.items():
    sharing[plan.lease_devices(process.place) or name].append(name)
  bundles, bundle, needs = [], {}, {}
  for i, names in enumerate(sharing.values()):
    together = [processes[name] for name in names]
    for name in names:
      bundle[name] = i
      needs[name] = need(plan, processes[name], together, kind)
    counts = (collections.Counter(needs[name]) for name in names)
    total = sum(counts, collections.Counter())
    bundles.append({what: round(n, 4) for what, n in total.items()})
  group = util.placement_group(bundles, strategy='PACK')
  if not group.wait(READY):
    util.remove_placement_group(group)
    wanted = ', '.join(
      f'{len(place.devices)} {kind} for {name!r}'
      for name, place in plan.places.items()
    )
    raise ValueError(
      f'The plan wants {wanted}, and Ray has '
      f'{ray.cluster_resources().get(kind, 0):g} {kind} in all: add nodes, or '
      'bind a plan for fewer.'
    )
  return Reservation(group, bundle, needs)


def actor_options(
  reservation: Reservation, name: str, place, interface: str | None
) -> dict[str, Any]:
  """Options of Ray for the actor of a process, with the devices reserved.

  Args:
    reservation: of a plan.
    name: of the process.
    place: its placement in the plan.
    interface: on which it listens; None for the one that Ray uses.
  """
  needs = reservation.needs[name]
  return {
    'name': f'{name} ({os.getpid()}-{os.urandom(3).hex()})',
    'num_cpus': needs['CPU'],
    'num_gpus': needs.get('GPU', 0),
    'resources': {'TPU': needs['TPU']} if 'TPU' in needs else None,
    'scheduling_strategy': scheduling.PlacementGroupSchedulingStrategy(
      reservation.group,
      placement_group_bundle_index=reservation.bundle[name],
    ),
    'runtime_env': {'env_vars': environment(place, needs, interface)},
  }


def machines(reservation: Reservation) -> set[str]:
  """Addresses of the machines on which devices are reserved."""
  addresses = {
    node['NodeID']: node['NodeManagerAddress'] for node in ray.nodes()
  }
  nodes = util.placement_group_table(reservation.group)['bundles_to_node_id']
  return {addresses[node] for node in nodes.values()}


def need(
  plan,
  process: actor_lib.Process,
  together: Sequence[actor_lib.Process],
  kind: str,
) -> dict[str, float]:
  """Resources of one process, by kind.

  Args:
    plan: with the devices of its place.
    process: the process.
    together: processes that share its devices, itself included.
    kind: of device.

  Raises:
    ValueError: for devices that Ray cannot give to several processes.
  """
  n = float(len(plan.places[process.place].devices) // process.count)
  if len(together) > 1 and kind != 'CPU':
    shared = len(plan.lease_devices(process.place))
    if kind != 'GPU' or shared > 1:
      raise ValueError(
        f'The places {[x.place for x in together]} share {shared} {kind}: '
        'processes can share processors, or a single GPU. Place their stages '
        'together, or run them in one process.'
      )
    n = 1 / len(together)
  return {'CPU': 1.0} | {kind: n}


def environment(
  place, needs: Mapping[str, float], interface: str | None = None
) -> dict[str, str]:
  """Environment variables that an actor's JAX must start with.

  Args:
    place: its placement in the plan.
    needs: its resources, as `need`.
    interface: on which it listens; None for the one that Ray uses.
  """
  variables = {
    name.upper(): str(value)
    for name in SETTINGS
    if (value := getattr(jax.config, name, None)) is not None
  }
  if needs.keys() == {'CPU'}:
    variables |= {
      'JAX_PLATFORMS': 'cpu',
      'JAX_NUM_CPU_DEVICES': str(len(place.devices) // place.processes),
    }
  else:
    # The best there is. The driver, and so its environment, may name the CPU.
    variables['JAX_PLATFORMS'] = ''
    if interface and 'NCCL_SOCKET_IFNAME' not in os.environ:
      variables['NCCL_SOCKET_IFNAME'] = f'={interface}'
    if needs.get('GPU', 1) < 1:  # Freed memory must be another process's.
      variables['XLA_PYTHON_CLIENT_ALLOCATOR'] = 'platform'
  # Folders that the driver imports from, such as experiments of a checkout.
  own = [path for path in sys.path if not path.startswith(sys.prefix)]
  variables['PYTHONPATH'] = os.pathsep.join(map(os.path.abspath, own))
  if 'XLA_FLAGS' in os.environ:
    variables['XLA_FLAGS'] = os.environ['XLA_FLAGS']
  return variables
