"""Shows where the time of a step goes, from a run of the arithmetic job.

  python -m experiments.motivation runs/arithmetic

Measures with the run's trained model which completions are unfinished when,
and how generation and learning grow with the batch; reads from the run what
its stages durations. Writes motivation.png and results.json beside this file.
"""

import collections
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
from matplotlib import pyplot as plt
import numpy as np

from experiments.prediction import setting as setting_lib
from planner.ir import flow as flow_lib
from rlinf_jax.planning.profiling import call_timing
from rlinf_jax.run_files import run_folder

PROMPTS = 1, 2, 4, 8, 16, 32, 64
HERE = pathlib.Path(__file__).parent
SMALL = 0.01  # Of a step: stages that take less are shown as one.


def setting(checkpoint: str, prompts: int):
  """The recipe's flow for so many prompts, its state and its batch."""
  workflow, source = setting_lib.recipe(checkpoint, prompts)
  state = workflow.init(jax.random.key(0))
  _, batch = source.next(source.init(0), {})
  flow = flow_lib.trace(workflow.step, state, batch, jax.random.key(0))
  return flow, (state, batch, jax.random.key(0))


def calls(checkpoint: str, prompts: int):
  """Calls of `generate` and `gradient` on what a step gives them.

  Returns:
    Both calls, and the tokens of each completion.
  """
  flow, given = setting(checkpoint, prompts)
  starts = (start for start, _ in flow.carry)
  leaves = map(jnp.asarray, jax.tree.leaves(given))
  memory = dict(zip((*starts, *flow.inputs), leaves, strict=True))
  calls_by_stage = {}
  for node in flow.nodes:
    leaves = [memory[v] for v in node.reads]
    args = jax.tree.unflatten(node.in_tree, leaves)
    calls_by_stage[node.name] = lambda run=node.stage.run, args=args: run(*args)
    out = node.stage.run(*args)
    memory |= zip(node.writes, jax.tree.leaves(out), strict=True)
    if node.name == 'generate':
      tokens = np.asarray(out.mask.sum(1), int)
    if node.name == 'gradient':
      break
  return calls_by_stage['generate'], calls_by_stage['gradient'], tokens


def breakdown(folder: str) -> dict[str, float]:
  """Median seconds of a step by stage, in a run, and of what is no stage."""
  series = run_folder.read(folder).series
  spent = {
    name.removeprefix('time/'): float(np.median(some.value))
    for name, some in series.items()
    if name.startswith('time/') and name != 'time/evaluate'
  }
  step = spent.pop('step')
  shown = collections.Counter()
  for name, seconds in spent.items():
    shown[name if seconds > SMALL * step else 'all others'] += seconds
  shown['between stages'] = max(0.0, step - sum(shown.values()))
  return dict(shown.most_common())


def measure(folder: str) -> dict:
  """All numbers of the figure."""
  checkpoint = str(pathlib.Path(folder) / 'model')
  cases = [calls(checkpoint, prompts) for prompts in PROMPTS]
  both = [
    call for generate, gradient, _ in cases for call in (generate, gradient)
  ]
  durations = call_timing.seconds([[call] for call in both])
  tokens = cases[-1][2]
  step = durations[-2] / tokens.max()  # Seconds a token, prompts among them.
  unfinished = [float(np.mean(tokens > t)) for t in range(tokens.max() + 1)]
  return {
    'rows': [setting_lib.GROUP * prompts for prompts in PROMPTS],
    'generate seconds': durations[::2],
    'gradient seconds': durations[1::2],
    'longest': [int(tokens.max()) for *_, tokens in cases],
    'unfinished': unfinished,
    'seconds a token of all rows': step,
    'idle share of row steps': 1 - float(tokens.mean() / tokens.max()),
    'breakdown': breakdown(folder),
  }


def draw(found: dict):
  figure, (left, middle, right) = plt.subplots(
    1, 3, figsize=(12, 3.4), layout='constrained'
  )
  share = 100 * np.array(found['unfinished'])
  seconds = np.arange(len(share)) * found['seconds a token of all rows']
  left.step(seconds, share, where='post')
  left.set(
    title=f'Completions of {found["rows"][-1]} that are unfinished',
    xlabel='seconds since generation began',
    ylabel='%',
    ylim=(0, 102),
  )
  for name in ('generate', 'gradient'):
    middle.plot(found['rows'], found[f'{name} seconds'], 'o-', label=name)
  middle.set(
    title='Seconds of a call', xlabel='rows', xscale='log', yscale='log'
  )
  middle.legend()
  names = list(found['breakdown'])
  right.barh(names, list(found['breakdown'].values()))
  right.invert_yaxis()
  right.set(title='Seconds of a step by stage, median', xlabel='seconds')
  figure.savefig(HERE / 'motivation.png', dpi=110)


def main(folder: str):
  found = measure(folder)
  (HERE / 'results.json').write_text(json.dumps(found, indent=2))
  draw(found)
  for name, value in found.items():
    print(f'{name}: {value}')


if __name__ == '__main__':
  main(*sys.argv[1:])
