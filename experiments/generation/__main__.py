"""Tokens a second of decoding with slots, of static batches, and of vLLM.

  python -m experiments.generation --size 3.5M

The lengths of completions have a long tail, see `long_tail`. Each way decodes
the same rows with as many at once: static batches one after the other, slots
in one loop, and vLLM with its own scheduler, whose rows are given the lengths
that the others have drawn. With --one_array, static batches also keep all
columns in one array, which every token reads in full. They alternate; the first
round compiles.
"""

import argparse
import functools
import json
import pathlib
import tempfile
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from experiments.generation import long_tail
from stages import base
from stages.language import huggingface, language_model
from stages.language.decoding import parts


def static_batches(act, params, prompt, key_B, slots: int):
  """Decodes all rows, `slots` at a time, each batch until its longest ends."""
  parts = [
    act(params, *jax.tree.map(lambda x: x[i : i + slots], (prompt, key_B)))
    for i in range(0, len(key_B), slots)
  ]
  return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def ways(args, config, params, prompt, key_B):
  """Functions that decode all rows, by name."""
  settings = {
    'response_length': args.length,
    'stop': (long_tail.STOP,),
  }

  def act(slots=None):
    policy = language_model.policy(config, slots=slots, **settings)
    return jax.jit(functools.partial(policy.act, group_size=args.group_size))

  def static(act):
    return static_batches(act, params, prompt, key_B, args.slots)

  def whole():
    columns = functools.partial(parts.part_columns, max_parts=1)
    with mock.patch.object(parts, 'part_columns', columns):
      return static(of_one_array)

  slotted, of_parts, of_one_array = act(args.slots), act(), act()
  run = {
    'static batches': lambda: static(of_parts),
    'slots': lambda: slotted(params, prompt, key_B),
  }
  return run | ({'one array': whole} if args.one_array else {})


def vllm_way(args, config, params, prompt, length_B):
  """A function that decodes rows of given lengths with vLLM."""
  # The first sets the environment that vLLM is started in.
  from rlinf_jax.engines import vllm, vllm_engine, vllm_request, vllm_start

  del vllm
  folder = pathlib.Path(tempfile.mkdtemp())
  huggingface.save(folder, params, config, eos_token_id=long_tail.STOP)
  engine = vllm_engine.get(
    vllm_start.Settings(str(folder), config, args.slots, None, None)
  )
  request = vllm_request.Request(
    params,
    huggingface.names(folder),
    np.asarray(prompt.token).tolist(),
    [{'max_tokens': int(n)} for n in length_B],
    args.prompt + args.length,
  )

  def run():
    completions = engine.submit(request).result()
    return sum(len(x.token) for x in completions)

  return run


def same(got: base.Experience, want: base.Experience) -> float:
  """The largest difference of log-probabilities; tokens must be equal."""
  for name in ('action', 'mask', 'truncated'):
    np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
  return float(jnp.abs(got.logp - want.logp).max())


def parse():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--size', choices=long_tail.SIZES, default='3.5M')
  parser.add_argument('--slots', type=int, default=32)
  parser.add_argument('--groups', type=int, default=32)
  parser.add_argument('--group_size', type=int, default=8)
  parser.add_argument('--prompt', type=int, default=32)
  parser.add_argument('--median', type=float, default=12)
  parser.add_argument('--length', type=int, default=256)
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--one_array', action='store_true')
  parser.add_argument('--vllm', action='store_true')
  parser.add_argument('--json', help='file to write the numbers to')
  return parser.parse_args()


def main():
  args = parse()
  config = long_tail.SIZES[args.size]
  params = long_tail.params(config, args.median)
  prompt = long_tail.prompts(config, args.groups, args.group_size, args.prompt)
  key_B = jax.random.split(jax.random.key(0), args.groups * args.group_size)
  run = ways(args, config, params, prompt, key_B)
  want = run['static batches']()
  apart = max(same(run[name](), want) for name in run)
  length_B = np.asarray(want.mask.sum(1)).astype(int)
  if args.vllm:
    run['vLLM'] = vllm_way(args, config, params, prompt, length_B)
    assert run['vLLM']() == length_B.sum()
  spent = {name: [] for name in run}
  for _ in range(args.rounds):
    for name, fn in run.items():
      start = np.array([time.perf_counter(), time.process_time()])
      jax.block_until_ready(fn())
      end = np.array([time.perf_counter(), time.process_time()])
      spent[name].append((end - start).tolist())
  report(args, params, length_B, spent, apart)


def report(args, params, length_B, spent, apart):
  """Prints the lengths and the rates, and writes them to a file if asked."""
  median, p95 = np.quantile(length_B, [0.5, 0.95])
  count = sum(x.size for x in jax.tree.leaves(params))
  batches = length_B.reshape(-1, args.slots)
  print(
    f'{count / 1e6:.1f}M parameters; {len(length_B)} rows of '
    f'{length_B.mean():.1f} tokens, median {median:.0f}, 95th percentile '
    f'{p95:.0f}, longest {length_B.max()}; {args.slots} at once. Static '
    f'batches take {batches.max(1).sum()} steps; slots that are always full, '
    f'{length_B.sum() / args.slots:.0f}. Tokens are the same, and '
    f'log-probabilities differ by at most {apart:.1e}.'
  )
  rate = {k: length_B.sum() / np.array(v) for k, v in spent.items()}
  numbers = vars(args) | {'lengths': length_B.tolist(), 'seconds': spent}
  for i, unit in enumerate(('second', 'CPU-second')):
    for name, tokens in rate.items():
      ratio = tokens[:, i] / rate['static batches'][:, i]
      print(
        f'{name}: {np.median(tokens[:, i]):.0f} tokens a {unit}, '
        f'{np.median(ratio):.2f} of static batches '
        f'({ratio.min():.2f} to {ratio.max():.2f})',
        flush=True,
      )
  if args.json:
    pathlib.Path(args.json).write_text(json.dumps(numbers))


if __name__ == '__main__':
  main()
