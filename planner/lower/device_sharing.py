"""How places that share devices have them in turn.

A place takes them before it runs something, and lets them go before it waits
for a value: whoever waits for another has nothing that this one could need, so
they cannot wait for each other. What it holds waits in host memory meanwhile,
and only what is read comes back.
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
  """A program, with the devices of its place taken and let go.

  Args:
    program: otherwise complete.
    flow: that it is of.
    plan: in which the place shares devices.
    place: where it runs.
    loop: it is a round of one, after which the place goes on.
  """
  devices, rank = plan.lease_devices(place), plan.shared_devices.index(place)
  out, there = [], None  # Values surely on the devices; None: they may be gone.
  for op in program:
    match op:
      case Begin(i) | Run(i):
        reads = dict.fromkeys(flow.nodes[i].reads)
        away = tuple(v for v in reads if v not in (there or ()))
        if away or there is None:
          out.append(Acquire(devices, rank, away))
        there = {*(there or ()), *away}
        if isinstance(op, Run):
          there.update(flow.nodes[i].writes)
      case Recv(v, source) if source != SOURCE:
        out.append(Release(v, source))
        there = None
      case Repeat():
        there = None
      case Restore():
        continue  # Whoever reads it has it brought back.
      case Offload(v) if there:
        there.discard(v)
    out.append(op)
  return out if loop else [*out, Release()]
