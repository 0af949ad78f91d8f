"""Upper bounds of the model FLOPs utilization (MFU) of gradients on TPUs.

MFU is the arithmetic that a model needs, as a share of a device's peak in the
time of a call (PaLM, arXiv:2204.02311, appendix B). What is computed again does
not count. The fewest seconds of a call are those of the compiler's estimates of
cycles, with communication hidden behind them and kernels at the device's peak.
"""

from collections.abc import Mapping
import json
import math
import pathlib
from typing import Any

from experiments.compiled import case as case_lib

HERE = pathlib.Path(__file__).parent
HEAD = (
  'case',
  'remat',
  'matrix FLOPs: executed',
  'needed',
  'seconds at least',
  'MFU at most',
)


def needed_flops(case: case_lib.Case, config: Mapping[str, int]) -> float:
  """Returns the operations of matrix products that a gradient needs.

  Those of all devices: two for each weight and token forward, and four
  backward, and as many for each pair of tokens that attends.

  Args:
    case: the batch.
    config: the model, as in config.json.
  """
  width, heads = config['hidden_size'], config['num_attention_heads']
  of_head = config.get('head_dim') or width // heads
  keys = config['num_key_value_heads']
  layers = case.layers or config['num_hidden_layers']
  layer = 2 * width * of_head * (heads + keys)
  layer += 3 * width * config['intermediate_size']
  completions = case.groups * case.group_size * case.length
  tokens = case.groups * case.prompt + completions
  pairs = case.groups * (
    math.comb(case.prompt + 1, 2)
    + case.group_size
    * (case.length * case.prompt + math.comb(case.length + 1, 2))
  )
  products = (
    layers * layer * tokens + width * config['vocab_size'] * completions
  )
  return 6 * products + 12 * layers * heads * of_head * pairs


def table(results: Mapping[str, Any]) -> list[str]:
  """A Markdown table of the gradients whose seconds have a bound.

  Args:
    results: of the cases, by name.
  """
  lines = [f'| {" | ".join(HEAD)} |', f'|{"---|" * len(HEAD)}']
  for name, data in results.items():
    case = case_lib.read(name)
    file = HERE / 'models' / case.model / 'config.json'
    for stage in data['stages']:
      least = stage.get('least_seconds')
      if stage['name'] != 'gradient' or least is None or case.packed:
        continue
      devices = math.prod(size for _, size in case.axes)
      needed = needed_flops(case, json.loads(file.read_text())) / devices
      peak = case_lib.cluster(case).device.peak('bfloat16')
      share = needed / least / peak
      lines.append(
        f'| `{name}` | {case.remat} | {stage["matmul_flops"] / 1e12:.3g} T | '
        f'{needed / 1e12:.3g} T | {least:.3g} | {share:.1%} |'
      )
  return lines
