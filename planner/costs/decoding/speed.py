"""Models the seconds of one step of decoding, as a function of its rows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planner.costs.mesh import collectives


class LinearTime(NamedTuple):
  """Seconds of a step: fixed, for each row, and for each column of a row.

  Attributes:
    fixed: seconds of a step without rows.
    row: more seconds for each row.
    column: more seconds for each column of a row, by kind of layers.
  """

  fixed: float
  row: float
  column: tuple[float, ...] = ()

  def at(self, rows, columns: Sequence = ()):
    """Returns the seconds of a step.

    Args:
      rows: number of rows.
      columns: those that are read of a row, as a mean, by kind of layers.
    """
    of_columns = zip(self.column, columns, strict=True)
    return self.fixed + rows * (self.row + sum(a * b for a, b in of_columns))


class DecodeSpeed(NamedTuple):
  """Seconds of a step on devices that share one copy of the parameters.

  Attributes:
    arithmetic: seconds of arithmetic, which overlap with `traffic`.
    traffic: seconds of memory traffic.
    communication: seconds of communication and of gaps between kernels, which
      do not overlap.
    prompts: seconds of prefilling, of arithmetic and of traffic.
    gather: seconds of gathering parameters.
  """

  arithmetic: LinearTime
  traffic: LinearTime
  communication: LinearTime
  prompts: tuple[LinearTime, LinearTime]
  gather: float

  def __call__(self, rows, columns: Sequence = ()):
    """Returns the seconds of a step; see `LinearTime.at`."""
    longer = np.maximum(
      self.arithmetic.at(rows, columns), self.traffic.at(rows, columns)
    )
    return longer + self.communication.at(rows)

  def read(self, rows: float) -> float:
    return max(line.at(rows) for line in self.prompts)


def decode_speed(decode, rows, model, parameters, placement) -> DecodeSpeed:
  """Returns the seconds of a step on a placement.

  Args:
    decode: the work of the stage, a `decode.DecodeWork`.
    rows: active rows.
    model: a `roofline.Roofline`.
    parameters: the parameters of the stage.
    placement: its placement.
  """
  device, assumed = model.cluster.device, model.assumed
  axes = placement.axes
  ways = parameters.ways(axes)

  def lines(call, columns=()):
    some = call.fixed, call.per_row, *columns
    arithmetic, traffic = [], []
    for work in some:
      other = work.other_flops / (
        device.vector_flops * assumed.vector_efficiency
      )
      products = sum(
        flops / (device.peak(kind) * assumed.matmul_efficiency)
        for kind, flops in work.matmul.items()
      )
      arithmetic.append((other + products) / ways)
      moved = work.bytes_moved / (
        device.memory_bandwidth * assumed.memory_efficiency
      )
      traffic.append(moved / ways)
    return tuple(
      LinearTime(fixed, row, tuple(column))
      for fixed, row, *column in (arithmetic, traffic)
    )

  def communication_seconds(rows, gather):
    spent = 0.0
    for part in collectives.communication(
      parameters, step.at(rows), axes, model.cluster
    ):
      if part.what.startswith('gather') == gather:
        link = model.axis_links.link(placement, part.axis)
        spent += (
          link.seconds(part.size, part.messages) * assumed.exposed_communication
        )
    return spent

  step = decode.step.near(rows)
  gaps = step.at(rows).kernels * device.kernel_gap_seconds
  one = communication_seconds(1, False)
  more = communication_seconds(2, False) - one
  arithmetic, traffic = lines(step, [x.work for x in decode.attention])
  prompts = lines(decode.prompt.near(rows))
  return DecodeSpeed(
    arithmetic,
    traffic,
    LinearTime(gaps + one - more, more),
    prompts,
    communication_seconds(1, True),
  )
