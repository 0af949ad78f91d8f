r"""CPU-seconds of decoding with keys and values in parts, and in one array.

  XLA_FLAGS=--xla_cpu_multi_thread_eigen=false \
    python -m experiments.generation.parts

Rows of full length, by a small random model; both ways alternate after a call
each that checks that they sample the same tokens.
"""

import argparse
import functools
import json
import statistics
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from stages import base
from stages.language import language_model
from stages.language.decoding import parts
from stages.models import transformer

CONFIG = transformer.Config(
  V=512, D=192, L=6, H=6, K=2, W=32, F=512, tie_embeddings=True
)
GROUP, PROMPT = 8, 32


def compiled(args, most: int):
  """`params, prompt, keys ->` completions, with at most so many parts."""
  policy = language_model.policy(CONFIG, response_length=args.length)
  call = jax.jit(functools.partial(policy.act, group_size=GROUP))
  params = policy.init(jax.random.key(0))
  ones = jnp.ones((args.rows, PROMPT), jnp.int32)
  inputs = (
    params,
    base.Prompt(ones, ones),
    jax.random.split(jax.random.key(1), args.rows),
  )
  columns = functools.partial(parts.part_columns, max_parts=most)
  with mock.patch.object(parts, 'part_columns', columns):
    return functools.partial(call.lower(*inputs).compile(), *inputs)


def main():
  """Prints the medians, and the range of their ratio, as JSON."""
  parser = argparse.ArgumentParser()
  parser.add_argument('--length', type=int, default=1024)
  parser.add_argument('--rows', type=int, default=32)
  parser.add_argument('--rounds', type=int, default=5)
  args = parser.parse_args()
  calls = {'parts': compiled(args, parts.MAX_PARTS), 'whole': compiled(args, 1)}
  tokens = [np.asarray(call().action) for call in calls.values()]
  np.testing.assert_array_equal(*tokens)
  took = {name: [] for name in calls}
  for _ in range(args.rounds):
    for name, call in calls.items():
      start = time.process_time()
      jax.block_until_ready(call())
      took[name].append(time.process_time() - start)
  ratios = [w / p for p, w in zip(*took.values(), strict=True)]
  medians = {name: statistics.median(some) for name, some in took.items()}
  found = {
    'ratio': statistics.median(ratios),
    'range': [min(ratios), max(ratios)],
  }
  print(json.dumps(medians | found))


if __name__ == '__main__':
  main()
