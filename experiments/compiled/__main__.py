"""Compiles cases, and tabulates the model's numbers beside the compiler's.

  python -m experiments.compiled NAME…   Compiles cases of cases.toml.
  python -m experiments.compiled again   Models all results again.
  python -m experiments.compiled         Prints the table of results.json.
  python -m experiments.compiled mfu     Bounds the MFU of gradients on TPUs.

Each case runs in this process, so name one at a time: a second topology needs
other settings. A case takes seconds (two layers) to minutes (all layers).
"""

import json
import os
import pathlib
import sys
import tomllib

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / 'results.json'
HEAD = (
  'case',
  'stage',
  'memory: compiled',
  'modeled',
  '',
  'matrix FLOPs: compiled',
  'modeled',
  '',
  'sent: compiled',
  'modeled',
  '',
)


def main():
  names = sys.argv[1:]
  cases = tomllib.loads((HERE / 'cases.toml').read_text())
  if names == ['again']:
    names = []
    _model_again()
  if names == ['mfu']:
    os.environ['JAX_PLATFORMS'] = 'cpu'
    from experiments.compiled import mfu  # It imports JAX.

    print('\n'.join(mfu.table(json.loads(RESULTS.read_text()))))
    return
  unknown = [name for name in names if name not in cases]
  if unknown:
    sys.exit(f'There is no case {unknown[0]}: cases.toml has {[*cases]}.')
  for name in names:
    os.environ['JAX_PLATFORMS'] = 'cpu'
    from experiments.compiled import case  # It imports JAX.

    data = case.run(case.read(name))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    _write(results | {name: data})
  if not names:
    print('\n'.join(table(json.loads(RESULTS.read_text()), cases)))


def _model_again():
  """Models the compiled cases again, after a change of the model."""
  os.environ['JAX_PLATFORMS'] = 'cpu'
  from experiments.compiled import case  # It imports JAX.

  results = json.loads(RESULTS.read_text())
  for name, data in results.items():
    case.model_again(case.read(name), data)
  _write(results)


def _write(results):
  RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + '\n')


def table(results, cases) -> list[str]:
  """A Markdown table, a line for each stage, in the order of the cases."""
  lines = [f'| {" | ".join(HEAD)} |', f'|{"---|" * len(HEAD)}']
  for name in cases:
    data = results.get(name, {'stages': [], 'refusal': None})
    for stage in data['stages']:
      memory = stage['memory']
      cells = [f'`{name}`', stage['name']]
      cells += _pair(memory['total'], memory['modeled'], 1e9, 'GB')
      for what, unit, letter in (
        ('matmul_flops', 1e12, 'T'),
        ('collective_bytes', 1e9, 'GB'),
      ):
        cells += _pair(stage[what], stage[f'modeled_{what}'], unit, letter)
      lines.append(f'| {" | ".join(cells)} |')
    if data['refusal']:
      lines.append(f'| `{name}` | refused: {data["refusal"]} |')
  return lines


def _pair(compiled, modeled, unit, letter) -> list[str]:
  """Returns both numbers, and by how much the modeled one differs."""
  if modeled is None:
    return [f'{compiled / unit:.3g} {letter}', '-', '-']
  ratio = f'{100 * (modeled / compiled - 1):+.0f} %' if compiled else '-'
  return [f'{compiled / unit:.3g} {letter}', f'{modeled / unit:.3g}', ratio]


if __name__ == '__main__':
  main()
