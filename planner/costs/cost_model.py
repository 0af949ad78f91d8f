"""Protocols of a cost model, and of work whose time is not linear in rows."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from planner.costs import measured
from planner.costs.mesh import layout as layout_lib
from planner.ir import graph
from planner.ir import plan as plan_lib

Axes = tuple[tuple[str, int], ...]


class Model(Protocol):
  """The costs of stages, transfers and memory on placements; `search` uses it.

  The costs of a place depend only on the place itself: its stages, its devices
  (which are consecutive), its axes, and the plan's pieces,
  micro-batches, remat and offloaded stages. Memory also depends on which
  carried values the place holds. Only `contention` depends on other places.

  Attributes:
    capacity: bytes of a device that may be used.
    alignment: the first device of a place matters only modulo this number, for
      the seconds of its calls: the devices of a node, where there are several.
  """

  capacity: float
  alignment: int

  def axes(self, stages: tuple[str, ...], devices: int) -> Sequence[Axes]:
    """Returns the meshes that a place of these stages may have, if any."""

  def seconds(
    self,
    flow: graph.Flow,
    node: graph.Node,
    placement: plan_lib.Placement,
    rows: int | None,
    remat: str = plan_lib.STORE_ALL,
  ) -> float:
    """Returns the time of a call of a node in micro-batches of `rows`."""

  def transfer(
    self,
    flow: graph.Flow,
    value: int,
    source: plan_lib.Placement,
    target: plan_lib.Placement,
  ) -> float:
    """Returns the time of moving a value from place to place."""

  def switch(
    self, flow: graph.Flow, value: int, placement: plan_lib.Placement
  ) -> float:
    """Returns the time of moving a value between device and host memory."""

  def contention(self, stage: str, devices: int, beside: int) -> float:
    """Returns the slowdown of a call on `devices` devices, at least 1.

    Meanwhile `beside` other devices are busy.
    """

  def memory(
    self, flow: graph.Flow, chosen: plan_lib.Plan, place: str
  ) -> Mapping[str, float]:
    """Returns the most bytes on a device of a place while each node runs.

    They are by the node's name, over all its calls. Those of a stage must not
    depend on the micro-batches and remat of others. The flow is as
    recorded: `chosen.pieces` says how it is cut.
    """

  def least_memory(
    self,
    flow: graph.Flow,
    node: graph.Node,
    placement: plan_lib.Placement,
    execution: plan_lib.Execution,
    pieces: int,
  ) -> float:
    """Returns the bytes of a device that a node needs in every plan.

    This is a lower bound of `memory` over all plans in which the node has this
    execution. A search skips the executions whose bound exceeds the device.
    """


class NonlinearWork(Protocol):
  """Work whose time is not proportional to its rows, such as decoding."""

  def seconds(
    self,
    model,
    flow: graph.Flow,
    node: graph.Node,
    placement: plan_lib.Placement,
    rows: int,
  ) -> Mapping[str, measured.Estimate]:
    """Returns the seconds of a call in micro-batches, by component."""

  def bytes(
    self,
    flow: graph.Flow,
    node: graph.Node,
    axes: Axes,
    layout: layout_lib.Layout,
    pieces: int,
    rows: int | None,
  ) -> Mapping[str, measured.Estimate]:
    """Returns the bytes on a device of a mesh during the call, by component."""
