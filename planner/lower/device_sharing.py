"""Adds instructions by which places that share devices take turns.

A place acquires the devices before it runs a stage and releases them before it
waits for a value. A waiting place holds no devices, so there is no deadlock.
Its values are offloaded to host memory meanwhile, and only those that are read
are restored.
"""

from planner.ir import graph
from planner.ir.instruction import (
  Acquire,
  Begin,
  Offload,
  Recv,
  Release,
  Repeat,
  Restore,
  Run,
  SOURCE,
)


def add_leases(program, flow: graph.Flow, plan, place: str, loop: bool) -> list:
  """Adds `Acquire` and `Release` to the program of a place.

  Args:
    program: the program, otherwise complete.
    flow: the flow that it is lowered from.
    plan: a plan in which the place shares devices.
    place: name of the place.
    loop: whether the program is a loop's body, after which the place goes on.
  """
  devices, rank = plan.lease_devices(place), plan.shared_devices.index(place)
  out, there = [], None  # Values certainly on the devices; None if released.
  for op in program:
    match op:
      case Begin(i) | Run(i):
        hosted = dict(op.streamed) if isinstance(op, Run) else {}
        reads = dict.fromkeys(flow.nodes[i].reads)
        stay = {*hosted, *(there or ())}
        away = tuple(v for v in reads if v not in stay)
        if away or there is None:
          out.append(Acquire(devices, rank, away))
        there = {*(there or ()), *away}
        if isinstance(op, Run):
          there.update({*flow.nodes[i].writes}.difference(hosted.values()))
      case Recv(v, source) if source != SOURCE:
        out.append(Release(v, source))
        there = None
      case Repeat():
        there = None
      case Restore():
        continue  # `Acquire` restores what is read.
      case Offload(v) if there:
        there.discard(v)
    out.append(op)
  return out if loop else [*out, Release()]
