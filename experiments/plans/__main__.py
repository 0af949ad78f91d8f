"""Plans the recipes with published hyper-parameters, and prints a table.

  python -m experiments.plans OUTPUT             # All rows of README.md.
  python -m experiments.plans OUTPUT grpo_qwen2.5_7b/h100x64 …  # Some of them.

A row is a recipe of `gin_configs/recipes` and a cluster of
`gin_configs/clusters`. Each is planned by a process of its own, one after the
other; rows whose file is in OUTPUT are not planned again, so that a call that
was stopped goes on. OUTPUT/RECIPE/CLUSTER.json has the whole report as data,
and CLUSTER.txt beside it what `--plan_only` printed.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys

from experiments.plans import models
from stages.models.layers import cudnn

ROOT = pathlib.Path(__file__).parents[2]
MODELS = {
  'grpo_qwen2.5_1.5b': 'DeepSeek-R1-Distill-Qwen-1.5B',
  'grpo_qwen2.5_7b': 'DeepSeek-R1-Distill-Qwen-7B',
  'grpo_qwen2.5_32b': 'DeepSeek-R1-Distill-Qwen-32B',
  'grpo_qwen3_30b_a3b': 'Qwen3-30B-A3B-Base',
  'dapo_qwen2.5_32b': 'Qwen2.5-32B',
  'ppo_qwen2.5_7b': 'Qwen2.5-7B',
}
CLUSTERS = (
  *('h100', 'h100x64', 'h100x256'),
  *('tpu_v5p_8', 'tpu_v5p', 'tpu_v5p_256'),
)
ROWS = [f'{recipe}/{cluster}' for recipe in MODELS for cluster in CLUSTERS]
HEAD = """| recipe | on | plan | seconds | proof | CPU-seconds |
|---|---|---|---:|---|---:|"""


def command(row: str, bindings: dict[str, str], report: pathlib.Path):
  """Words of the command that plans a row."""
  recipe, cluster = row.split('/')
  if recipe.startswith('grpo_qwen2.5') and cluster.startswith('tpu'):
    # Dense models: Splash attention computes packed rows.
    bindings = bindings | {'PACKED': '28672'}
  return [
    *(sys.executable, '-m', 'rlinf_jax.main', '--plan_only'),
    *('--gin_file', f'gin_configs/recipes/{recipe}.gin'),
    *('--cluster', f'gin_configs/clusters/{cluster}.gin'),
    *('--host_seconds', 'reward=0.01', '--plan_json', str(report)),
    *(f'--gin.{name}={value}' for name, value in bindings.items()),
  ]


def plan(row: str, output: pathlib.Path):
  """Plans a row into its file, unless it is there."""
  file = output / f'{row}.json'
  if file.exists():
    return
  file.parent.mkdir(parents=True, exist_ok=True)
  report = file.with_suffix('.part')
  bindings = models.write(output / 'models', MODELS[row.split('/')[0]])
  start = _children_seconds()
  with file.with_suffix('.txt').open('w') as printed:
    status = subprocess.run(
      command(row, bindings, report),
      cwd=ROOT,
      env=os.environ | {'JAX_PLATFORMS': 'cpu'},
      stdout=printed,
      stderr=subprocess.STDOUT,
    ).returncode
  if status:
    sys.exit(f'{row} has no plan: {printed.name} says why.')
  data = json.loads(report.read_text())
  data['cpu_seconds'] = _children_seconds() - start
  report.unlink()
  file.write_text(json.dumps(data))


def _children_seconds() -> float:
  """Seconds of a processor that processes took which have ended."""
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  return usage.ru_utime + usage.ru_stime


def line(row: str, data: dict) -> str:
  """A line of the table in Markdown, from a report as data."""
  recipe, cluster = row.split('/')
  places = data['plan']['places'].values() if data['plan'] else ()
  count = len({n for place in places for n in place['devices']})
  chip = 'v5p' if 'v5p' in cluster else cluster.split('x')[0].upper()
  searched, seconds = data['searched'], data['seconds']
  proof = 'proved' if searched['proved'] else f'gap {searched["gap"]:.1%}'
  cells = [
    f'`{recipe}`',
    f'{count} {chip}',
    describe(data['plan']),
    f'{float(f"{seconds:.3g}"):,.0f}',
    proof,
    f'{data["cpu_seconds"]:.0f}',
  ]
  return f'| {" | ".join(cells)} |'


def describe(plan: dict) -> str:
  """A plan's meshes, with the first stage of each place if it has several."""
  places = dict(plan['places'])
  turns = places.pop('generation', None)  # On devices of the others.
  parts = []
  for name, place in places.items():
    mesh = _mesh(place)
    if len(places) > 1:
      first = next(k for k, x in plan['stages'].items() if x == name)
      mesh = f'{first} … on {len(place["devices"])}, {mesh}'
    parts.append(mesh)
  if turns:
    parts.append(f'generation on {_mesh(turns)}')
  if plan['offload']:
    parts.append('moments in host memory')
  if plan['pieces'] > 1:
    parts.append(f'{plan["pieces"]} pieces')
  return '; '.join(parts)


def _mesh(place: dict) -> str:
  axes = ' '.join(f'{name}={size}' for name, size in place['axes'])
  return f'`{axes}`'


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('output', type=pathlib.Path)
  parser.add_argument('rows', nargs='*', default=ROWS)
  args = parser.parse_args()
  for row in args.rows:
    recipe, _, cluster = row.partition('/')
    clusters = ROOT / 'gin_configs/clusters'
    if recipe not in MODELS or not (clusters / f'{cluster}.gin').is_file():
      parser.error(f'No row is called {row!r}: rows are such as {ROWS[0]}.')
  if not cudnn.is_here():
    parser.error(
      'JAX finds no cuDNN on this machine, whose kernel is the attention '
      'that plans for H100s count: install rlinf-jax[aot] (make aot).'
    )
  print(HEAD)
  output = args.output.absolute()
  for row in args.rows:
    plan(row, output)
    data = json.loads((output / f'{row}.json').read_text())
    print(line(row, data), flush=True)


if __name__ == '__main__':
  main()
