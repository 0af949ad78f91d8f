"""Decoding and scoring with weights rounded beforehand, on an accelerator.

  python -m experiments.h100.rounding experiments/compiled/models/qwen2.5-1.5b

A place that only samples or scores is sent weights in bfloat16; the stages of
other places are given weights in float32 and round them. The two programs
differ, and a compiler may choose different kernels for them. Prints whether
both compute the same bits for tokens and log-probabilities of a random model
with the sizes in the folder's config.json, and the milliseconds of each.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp

from experiments.generation import long_tail
from rlinf_jax.system import allocator
from stages.language import huggingface, language_model
from stages.models import transformer

ROUNDS = 5


def parse():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('model', type=pathlib.Path)
  parser.add_argument('--layers', type=int, help='fewer than the model has')
  parser.add_argument('--groups', type=int, default=8)
  parser.add_argument('--group_size', type=int, default=8)
  parser.add_argument('--prompt', type=int, default=256)
  parser.add_argument('--length', type=int, default=128)
  parser.add_argument('--slots', type=int, nargs='*', default=[0, 32])
  return parser.parse_args()


def timed(fn, *args):
  """The result of a call, and its median milliseconds after compilation."""
  found, took = jax.block_until_ready(fn(*args)), []
  for _ in range(ROUNDS):
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    took.append(1e3 * (time.perf_counter() - start))
  return found, statistics.median(took)


def compare(name: str, fn, wide, narrow, *args):
  """Prints how the results of `fn` differ between two kinds of parameters.

  The line has the share of numbers that differ and the largest difference, for
  each array of the results.

  Args:
    name: what is computed.
    fn: `(params, *args) -> arrays`, jitted; the arrays are zero on padding.
    wide: parameters in float32.
    narrow: the same parameters, rounded.
    *args: further arguments.
  """
  want, first = timed(fn, wide, *args)
  got, second = timed(fn, narrow, *args)
  pairs = list(zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True))
  line = {
    'computed': name,
    'same_bits': all(bool(jnp.array_equal(x, y)) for x, y in pairs),
    'differing_share': [float((x != y).mean()) for x, y in pairs],
    'most': [float(jnp.abs(x - y).max()) for x, y in pairs],
    'milliseconds_float32': round(first, 2),
    'milliseconds_rounded': round(second, 2),
  }
  print(json.dumps(line), flush=True)


def main():
  """Prints a line of JSON for each way of decoding, and one for scoring."""
  allocator.claim_accelerators()
  args = parse()
  config = huggingface.load_config(args.model)
  config = dataclasses.replace(
    config, dtype='bfloat16', L=args.layers or config.L
  )
  make = functools.partial(
    language_model.policy,
    config,
    response_length=args.length,
    stop=(long_tail.STOP,),
  )
  wide = transformer.init_params(config, jax.random.key(1))
  narrow = jax.jit(make().round_params)(wide)
  prompt = long_tail.prompts(config, args.groups, args.group_size, args.prompt)
  key_B = jax.random.split(jax.random.key(0), args.groups * args.group_size)
  print(json.dumps({'device': jax.devices()[0].device_kind}), flush=True)
  for slots in args.slots:
    policy = make(slots=slots or None)

    @jax.jit
    def sample(params, prompt, key_B, policy=policy):
      x = policy.act(params, prompt, key_B, group_size=args.group_size)
      return x.action * x.mask, x.logp * x.mask

    name = f'tokens and log-probabilities, {slots or "no"} slots'
    compare(name, sample, wide, narrow, prompt, key_B)
  policy = make()
  act = functools.partial(policy.act, group_size=args.group_size)
  drawn = jax.jit(act)(wide, prompt, key_B)

  @jax.jit
  def score(params, x):
    return policy.evaluate(params, x.obs, x.action).logp * x.mask

  compare('log-probabilities of a forward pass', score, wide, narrow, drawn)


if __name__ == '__main__':
  main()
