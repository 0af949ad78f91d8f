"""One case: a model on a topology and a mesh, modeled and compiled."""

import dataclasses
import functools
import json
import pathlib
import tempfile
import tomllib

from planner import cluster as cluster_lib
from planner.costs import roofline
from planner.costs.mesh import per_device
from planner.counting import count
from planner.ir import plan as plan_lib
from planner.lower import unroll
from rlinf_jax import train
from rlinf_jax.config import config
from rlinf_jax.planning.compiled import plan_compiler, report
from rlinf_jax.planning.compiled import topology as topology_lib
from rlinf_jax.runtime import flows as flows_lib
from sharding import rules

HERE = pathlib.Path(__file__).parent
RECIPE = 'experiments/compiled/grpo.gin'


@dataclasses.dataclass(frozen=True)
class Case:
  """The model, the devices and the batch of a compilation.

  Attributes:
    model: folder of a config.json in `models`.
    cluster: file in gin_configs/clusters, for the numbers of a device.
    topology: the devices, as in `rlinf_jax.planning.compiled.topology`.
    axes: names and sizes of the mesh axes.
    layers: number of layers; None for those of the model.
    groups: prompts of a batch.
    group_size: completions of each.
    prompt: tokens of a prompt.
    length: tokens of a completion.
    rows: rows of a micro-batch of `gradient`; None for all.
    packed: tokens of a packed row; None without packing.
    slots: rows that a device decodes at once; None for all together.
    remat: activations that `gradient` stores, as in `stages.remat`.
    offload: stages whose own carried values are in host memory.
    stages: names of the stages to compile.
    apart: whether these have a place of their own, which takes turns with that
      of the others on the same devices.
    gathers_weights: whether gradients on v5p chips have the compiler options of
      a plan, by which they gather whole weights; otherwise XLA's defaults.
  """

  model: str
  cluster: str
  topology: str
  axes: tuple[tuple[str, int], ...]
  layers: int | None = None
  groups: int = 8
  group_size: int = 8
  prompt: int = 512
  length: int = 1024
  rows: int | None = None
  packed: int | None = None
  slots: int | None = None
  remat: str = 'nothing_saveable'
  offload: tuple[str, ...] = ()
  stages: tuple[str, ...] = ('gradient', 'apply')
  apart: bool = False
  gathers_weights: bool = False


def read(name: str) -> Case:
  """Reads a case of cases.toml."""
  given = tomllib.loads((HERE / 'cases.toml').read_text())[name]
  return Case(**given | {'axes': tuple(given['axes'].items())})


def run(case: Case) -> dict:
  """Compiles a case; returns its report as data."""
  topology = topology_lib.parse(case.topology)
  topology_lib.prepare(topology)
  flow, model, plan = _planned(case, topology)
  compiler = plan_compiler.PlanCompiler(
    flow,
    model,
    topology_lib.devices(topology),
    functools.partial(print, flush=True),
  )
  compiled = compiler.compile(plan, case.stages)
  data = report.to_data(compiled, topology)
  print('\n'.join(report.text(data)), flush=True)
  platform = model.cluster.device.platform or 'cpu'
  print('Attention:', flows_lib.attention(flow, platform), flush=True)
  if compiled.refusal:
    print('Refused:', compiled.refusal, flush=True)
  return data | {'refusal': compiled.refusal}


def model_again(case: Case, data: dict):
  """Replaces the modeled numbers in the data of a compiled case."""
  flow, model, plan = _planned(case, topology_lib.parse(case.topology))
  for stage in data['stages']:
    costs = per_device.stage_costs(
      flow, plan, model, stage['name'], stage['rows']
    )
    stage['memory']['modeled'] = costs.memory
    stage['modeled_matmul_flops'] = costs.matmul_flops
    stage['modeled_collective_bytes'] = costs.collective_bytes


def cluster(case: Case) -> cluster_lib.Cluster:
  """Returns the cluster of a case, with as many devices as its file has."""
  config.parse([f'gin_configs/clusters/{case.cluster}.gin'], [], '')
  return config.call(cluster_lib.Cluster)


def _planned(case: Case, topology):
  """Returns the flow of a step, its cost model, and the plan of a case."""
  with tempfile.TemporaryDirectory() as folder:
    checkpoint = _checkpoint(case, pathlib.Path(folder))
    cluster, flow = _read(case, topology, checkpoint)
  flow = unroll.unroll(flow)
  works = count.of_flow(flow, platform=cluster.device.platform)
  model = roofline.Roofline(flow, works, cluster, rules.DEFAULT)
  placement = plan_lib.Placement(
    tuple(range(topology.num_devices)), tuple(case.axes)
  )
  micro_batch = {'gradient': case.rows} if case.rows else {}
  plan = plan_lib.one_place(flow.stages, placement, micro_batch)
  remat = {name: case.remat for name in ('gradient',) if name in flow.stages}
  xla = {} if case.gathers_weights else {name: {} for name in flow.stages}
  plan = dataclasses.replace(
    plan,
    remat=remat,
    offload=tuple(case.offload),
    compiler_options=xla,
  )
  if case.apart:
    places = dict.fromkeys(('all', 'own'), placement)
    plan = dataclasses.replace(
      plan,
      places=places,
      stages=dict(plan.stages) | dict.fromkeys(case.stages, 'own'),
      shared_devices=tuple(places),
    )
  return flow, model, plan


def _checkpoint(case: Case, folder: pathlib.Path) -> str:
  """Writes a config.json with as many layers as the case has."""
  raw = json.loads((HERE / 'models' / case.model / 'config.json').read_text())
  raw['num_hidden_layers'] = case.layers or raw['num_hidden_layers']
  (folder / 'config.json').write_text(json.dumps(raw))
  return str(folder)


def _read(case: Case, topology, checkpoint: str):
  """Reads the cluster, and records the flow of a step."""
  bindings = {
    'CHECKPOINT': checkpoint,
    'GROUP': case.group_size,
    'GROUPS': case.groups,
    'PROMPT': case.prompt,
    'LENGTH': case.length,
    'PACKED': case.packed,
    'SLOTS': case.slots,
    'cluster.Cluster.num_devices': topology.num_devices,
    'cluster.Cluster.topology': case.topology,
    'cluster.Cluster.gathers_weights': case.gathers_weights,
  }
  config.parse(
    [RECIPE, f'gin_configs/clusters/{case.cluster}.gin'],
    [f'{name} = {value!r}' for name, value in bindings.items()],
    checkpoint,
  )
  cluster = config.call(cluster_lib.Cluster)
  flow, _ = config.call(flows_lib.trace_flows, bindings_of=train.train)
  return cluster, flow
