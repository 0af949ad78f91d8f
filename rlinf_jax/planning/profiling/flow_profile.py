"""Measures this machine, and the stages of a flow on it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import pathlib
from typing import Any, NamedTuple

import jax

from planner import cluster as cluster_lib
from planner.costs import measured as measured_lib
from planner.costs import roofline
from planner.counting import count
from planner.ir import graph
from planner.lower import unroll
from rlinf_jax.planning.profiling import machine_profile, stage_profile
from rlinf_jax.planning.profiling import profile_store as profile_store_lib
from rlinf_jax.runtime import programs
from rlinf_jax.state import state_readers
from sharding import rules as rules_lib


class Profile(NamedTuple):
  """Rates of a machine, and seconds and work of stages, to price plans by.

  Attributes:
    cluster: rates of the devices and links.
    stages: seconds of the stages; None where one device cannot hold the state.
    works: the work of each stage, as `count.of_flow` of the flow without loops;
      None if another process counted it, as it cannot be sent.
  """

  cluster: cluster_lib.Cluster
  stages: measured_lib.Measurements | None
  works: Mapping[str, Any] | None


class StartValues:
  """Values that a flow starts from: inputs, and a state, read part by part.

  It keeps no array of the state.
  """

  def __init__(
    self,
    flow: graph.Flow,
    state: state_readers.StateReader,
    inputs: Sequence[Any],
  ):
    """Reads nothing yet.

    Args:
      flow: as recorded.
      state: reads its carried values.
      inputs: its inputs, as arrays.
    """
    self._state, self._shapes = state, programs.state_shapes(flow)
    self._numbers = {start: i for i, (start, _) in enumerate(flow.carry)}
    self._inputs = dict(zip(flow.inputs, inputs, strict=True))

  def read(self, values: Iterable[int]) -> dict[int, Any]:
    """Returns some of the values, by id; those of the state on one device."""
    values = set(values)
    found = {v: self._inputs[v] for v in values & self._inputs.keys()}
    wanted = {self._numbers[v]: v for v in values & self._numbers.keys()}
    if wanted:
      device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
      layouts = {i: {'': device} for i in wanted}
      for i, _, x in self._state.read(self._shapes, layouts):
        found[wanted[i]] = x
    return found


def measure(
  flow: graph.Flow,
  state: state_readers.StateReader,
  inputs: Sequence[Any],
  folder: pathlib.Path | None = None,
  print_line: Callable[[str], None] | None = None,
) -> Profile:
  """Measures what was not measured before on an equal machine.

  Each part of the state is read when a stage first needs it, and freed after
  the last that does.

  Args:
    flow: of a step, as recorded.
    state: reads its carried values.
    inputs: its inputs, as arrays.
    folder: of earlier measurements; None for `profile_store.folder`.
    print_line: as `stage_profile.measure`.
  """
  flow = unroll.unroll(flow)  # The planner unrolls loops.
  works = count.of_flow(flow)
  store = profile_store_lib.Store(folder)
  cluster = machine_profile.measure_cluster(store)
  if not stage_profile.fits(flow):
    return Profile(cluster, None, works)
  model = roofline.Roofline(flow, works, cluster, rules_lib.DEFAULT)
  values = StartValues(flow, state, inputs)
  stages = stage_profile.measure(
    flow, values.read, model, store, print_line=print_line
  )
  return Profile(cluster, stages, works)
