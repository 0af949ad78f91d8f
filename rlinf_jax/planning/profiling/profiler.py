"""Measures stages in a process of their own, which ends when it has.

The driver of a run with Ray holds no state; this process makes or reads what a
stage needs.
"""

from collections.abc import Sequence
import os
import pathlib
from typing import Any

import jax
import ray
from ray import util

from planner.ir import plan as plan_lib
from rlinf_jax.planning.profiling import flow_profile, profile_store
from rlinf_jax.runtime.ray import actor as actor_lib
from rlinf_jax.runtime.ray import connection, pending, resources
from rlinf_jax.runtime.ray.transport import serialize
from rlinf_jax.state import state_readers
from rlinf_jax.system import allocator

NAME = 'profiler'


class Profiler:
  """The process, as a Ray actor."""

  def measure(
    self,
    flows: actor_lib.Flows,
    state: state_readers.StateReader,
    inputs: Sequence[serialize.Serialized],
    folder: str,
    measured: pathlib.Path,
  ) -> flow_profile.Profile:
    """As `measure`.

    Args:
      flows: records the flows.
      state: as `flow_profile.measure`.
      inputs: likewise.
      folder: the driver's working directory, entered if it exists here.
      measured: the driver's folder of earlier measurements.
    """
    allocator.retain_freed_memory()
    if os.path.isdir(folder):
      os.chdir(folder)
    step, _ = flows()
    leaves = [serialize.unpack(x) for x in inputs]
    profile = flow_profile.measure(step, state, leaves, measured)
    return profile._replace(works=None)


def measure(
  flows: actor_lib.Flows,
  state: state_readers.StateReader,
  inputs: Sequence[Any],
) -> flow_profile.Profile:
  """Measures a machine of the cluster, and stages on it.

  The process has as many devices as this one, which plans are made for.

  Args:
    flows: records those of a step and of an evaluation in any process.
    state: as `flow_profile.measure`; Ray must be able to pickle it.
    inputs: of a step, as arrays.

  Raises:
    ProcessDiedError: if the process died, such as for lack of memory.
    StageError: if a stage failed in it.
    ValueError: if Ray has too few devices.
  """
  connection.connect()
  count = len(jax.devices())
  axes = (('data', count),) if count > 1 else ()
  place = plan_lib.Placement(tuple(range(count)), axes)
  plan = plan_lib.Plan({NAME: place}, {})
  reservation = resources.reserve(plan, {NAME: actor_lib.Process(NAME, 0, 1)})
  options = resources.actor_options(reservation, NAME, place, None)
  actor = ray.remote(Profiler).options(**options).remote()
  try:
    packed = [serialize.pack(x) for x in inputs]
    folders = os.getcwd(), profile_store.folder()
    return ray.get(actor.measure.remote(flows, state, packed, *folders))
  except ray.exceptions.RayError as error:
    raise pending.as_stage_error(error, NAME) from None
  finally:
    ray.kill(actor)
    util.remove_placement_group(reservation.group)
