"""The mode that the cost model predicts to be fastest, case by case."""

import dataclasses
import functools
import pathlib
import tempfile

from experiments.modes import flows, published
from planner import cluster as cluster_lib
from planner.costs import roofline
from planner.costs.decoding import decode
from planner.explain import overview
from planner.search import exact
from planner.search.plans import grouping
from planner.search.plans import space as space_lib
from rlinf_jax.config import config

CLUSTERS = pathlib.Path(__file__).parents[2] / 'gin_configs' / 'clusters'
# All rows are shared over one axis, over which parameters are spread, too.
RULES = {'B': 'fsdp', 'D': 'fsdp', 'F': 'tensor'}
PIECES = 1, 2, 4, 8
SHARES = 8  # Places are eighths of the devices.


@dataclasses.dataclass(frozen=True)
class Replay:
  """The result of a case on some devices.

  Attributes:
    case: which.
    devices: how many.
    seconds: a step of the fastest plan of every mode; none if none fits.
    plans: those plans, in words.
    published_seconds: in temporal mode; None where it is not published.
    speedups: speed of the fastest other mode over temporal, as published and as
      modeled, of those tried.
    published_fastest: the mode that was faster, of those tried.
    modeled_fastest: likewise, as modeled.
    modeled_fastest_of_all: the fastest of all modes, tried or not.
  """

  case: str
  devices: int
  seconds: dict[str, float]
  plans: dict[str, str]
  published_seconds: float | None
  speedups: tuple[float | None, float]
  published_fastest: str
  modeled_fastest: str
  modeled_fastest_of_all: str

  @property
  def agrees(self) -> bool:
    return self.published_fastest == self.modeled_fastest


@functools.cache
def hardware() -> cluster_lib.Cluster:
  """A node of the paper's: eight H100, a 400 Gb/s port each (section 5.1)."""
  with tempfile.TemporaryDirectory() as folder:
    config.parse([str(CLUSTERS / 'h100.gin')], [], folder)
    return config.call(cluster_lib.Cluster)


def spaces(
  devices: int, workload: flows.Workload
) -> dict[str, space_lib.Space]:
  """The plans of every mode, which is how many places there are.

  Temporal is one place, spatial a place for each stage, hybrid what is between.
  """
  n = len(grouping.groups(workload.flow, workload.colocated))
  some = functools.partial(
    space_lib.Space,
    devices,
    unit=max(1, devices // SHARES),
    pieces=PIECES,
    colocated=workload.colocated,
  )
  found = {
    'temporal': some(max_places=1),
    'spatial': some(max_places=n, min_places=n),
  }
  if n > 2:
    found['hybrid'] = some(max_places=n - 1, min_places=2)
  return found


def replay(case: published.Case, devices: int, engine=True) -> Replay:
  """Searches the fastest plan of every mode.

  Args:
    case: which.
    devices: how many.
    engine: whether it generates, or a loop in JAX, which decodes every piece
      until its last row has ended.
  """
  at = case.devices.index(devices)
  there = hardware()
  there = dataclasses.replace(
    there,
    num_devices=devices,
    devices_per_node=min(devices, there.devices_per_node),
  )
  workload = flows.workload(case, case.rows[at], there.device.memory_bytes)
  if 'generate' in workload.works and not engine:
    workload.works['generate'] = _all_at_once(workload.works['generate'])
  model = roofline.Roofline(workload.flow, workload.works, there, RULES)
  seconds, plans = {}, {}
  for mode, space in spaces(devices, workload).items():
    found = exact.search(workload.flow, model, space, keep=1)
    if found.best is not None:
      seconds[mode] = float(found.seconds)
      plans[mode] = overview.one_line(workload.flow, found.best)
  tried = [mode for mode in case.tried if mode in seconds]
  others = [seconds[mode] for mode in tried if mode != 'temporal']
  return Replay(
    case.name,
    devices,
    seconds,
    plans,
    case.seconds[at],
    (case.speedup[at], seconds['temporal'] / min(others)),
    case.faster[at],
    min(tried, key=seconds.get),
    min(seconds, key=seconds.get),
  )


def _all_at_once(generate: decode.DecodeWork) -> decode.DecodeWork:
  """Decoding by a loop in which all rows wait for the longest one.

  Rows that have ended are still computed, so a step counts the attention of all
  rows at the mean context of the longest one.
  """
  columns = generate.context + generate.lengths.max() / 2
  step = generate.step
  for reads in generate.attention:
    per_row = step.per_row + reads.work.times(columns)
    step = dataclasses.replace(step, per_row=per_row)
  return dataclasses.replace(generate, step=step, attention=(), engine=False)


def table(found: list[Replay]) -> str:
  """As Markdown."""
  lines = [
    '| workload | devices | temporal: published | modeled | spatial | '
    'hybrid | faster: published | modeled | agree |',
    '|' + '---|' * 9,
  ]
  for one in found:
    spent = [
      f'{one.seconds[mode]:.3g} s' if mode in one.seconds else '–'
      for mode in published.THREE
    ]
    seconds = one.published_seconds
    seconds = f'{seconds:.4g} s' if seconds else '–'
    ratios = [f' ({ratio:.2f} ×)' if ratio else '' for ratio in one.speedups]
    lines.append(
      f'| {one.case} | {one.devices} | {seconds} | {" | ".join(spent)} | '
      f'{one.published_fastest}{ratios[0]} | '
      f'{one.modeled_fastest}{ratios[1]} | '
      f'{"yes" if one.agrees else "**no**"} |'
    )
  agree = sum(one.agrees for one in found)
  return '\n'.join([*lines, '', f'{agree} of {len(found)} agree.'])
