"""Decoding in slots on a GPU: its kernel, and rows with a long tail of lengths.

  python -m experiments.h100.slots experiments/compiled/models/qwen2.5-1.5b

The kernel is compared with float32, and timed beside XLA, which reads all
columns of the KV cache. Then completions whose lengths have a long tail
(`long_tail`) are decoded by a model of the sizes in the folder's config.json,
with random weights: in static batches, in slots with the kernel, and in slots
without. All tokens are scored again by a forward pass without a KV cache.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import statistics
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from experiments.generation import __main__ as generation
from experiments.generation import long_tail
from rlinf_jax.system import allocator
from stages import kernels
from stages.language import huggingface, language_model
from stages.language.decoding import kv_cache
from stages.language.decoding.slots import slot_cache

ROUNDS = 9
CALLS = 20  # Of one round, as one call is shorter than its launch.


def parse():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('model', type=pathlib.Path)
  parser.add_argument('--slots', type=int, default=64)
  parser.add_argument('--groups', type=int, default=32)
  parser.add_argument('--group_size', type=int, default=16)
  parser.add_argument('--prompt', type=int, default=256)
  parser.add_argument('--median', type=float, default=30)
  parser.add_argument('--length', type=int, default=768)
  parser.add_argument('--rounds', type=int, default=2)
  parser.add_argument('--layers', type=int, help='fewer than the model has')
  parser.add_argument('--columns', type=int, nargs='*', default=[1024, 28672])
  return parser.parse_args()


def say(**line):
  """Prints a line of JSON."""
  print(json.dumps({k: _rounded(v) for k, v in line.items()}), flush=True)


def _rounded(x):
  return float(f'{x:.4g}') if isinstance(x, float) else x


def problem(config, slots: int, C: int):
  """A cache, the queries and new columns of a layer, and columns filled."""
  keys = jax.random.split(jax.random.key(C), 6)

  def draw(key, *shape):
    return jax.random.normal(key, shape, jnp.bfloat16)

  shape = slots, config.K, C, config.W
  cache = kv_cache.LayerCache(draw(keys[0], *shape), draw(keys[1], *shape))
  q = draw(keys[2], slots, 1, config.H, config.W)
  k, v = (draw(x, slots, 1, config.K, config.W) for x in keys[3:5])
  # Log-uniform: a few rows are far longer than the others.
  share = jax.random.uniform(keys[5], (slots,), minval=-4.0, maxval=0.0)
  return cache, q, k, v, jnp.floor((C - 1) * jnp.exp(share)).astype(jnp.int32)


def time_kernels(config, slots: int, C: int):
  """Says errors and microseconds of a layer's attention to C columns."""
  cache, q, k, v, size_M = problem(config, slots, C)
  span = slot_cache.span(size_M, size_M >= 0, None)

  def extended(kernel, config, cache, q, k, v):
    return slot_cache.extend(config, kernel, cache, q, k, v, span)

  wide = jax.tree.map(lambda x: x.astype(jnp.float32), (cache, q, k, v))
  with jax.default_matmul_precision('highest'):
    exact = dataclasses.replace(config, dtype='float32')
    run = jax.jit(functools.partial(extended, kernels.WHOLE, exact))
    want = run(*wide)[1]
  del wide
  filled = 4 * config.K * config.W * float((size_M + 1).sum())
  for kernel in (kernels.DECODE_ATTENTION, kernels.WHOLE):

    def repeated(cache, q, k, v, kernel=kernel):
      # Each call's queries depend on what the last one saw.
      def body(_, state):
        cache, seen = state
        return extended(kernel, config, cache, q + 0 * seen, k, v)

      return jax.lax.fori_loop(0, CALLS, body, (cache, jnp.zeros_like(q)))

    run = jax.jit(repeated, donate_argnums=0)
    cache, seen = jax.block_until_ready(run(cache, q, k, v))
    took = []
    for _ in range(ROUNDS):
      start = time.perf_counter()
      cache, seen = jax.block_until_ready(run(cache, q, k, v))
      took.append((time.perf_counter() - start) / CALLS)
    seen = seen.astype(jnp.float32).reshape(want.shape)
    each = jnp.linalg.norm(seen - want, axis=-1)
    seconds = statistics.median(took)
    say(
      read_by=kernel,
      columns=C,
      filled=float(size_M.mean() + 1),
      microseconds=1e6 * seconds,
      filled_tb_a_second=filled / seconds / 1e12,
      error=float(jnp.linalg.norm(seen - want) / jnp.linalg.norm(want)),
      worst_head_error=float((each / jnp.linalg.norm(want, axis=-1)).max()),
    )


def compiled(config, args, arguments) -> dict:
  """Functions that decode all rows, by name, compiled at the same time."""
  settings = {'response_length': args.length, 'stop': (long_tail.STOP,)}
  params, prompt, key_B = arguments

  def lowered(slots, reads, rows):
    policy = language_model.policy(config, slots=slots, **settings)
    act = functools.partial(policy.act, group_size=args.group_size)
    by = mock.patch.dict(kernels.DECODING, {jax.default_backend(): reads})
    with by:
      some = jax.tree.map(lambda x: x[:rows], (prompt, key_B))
      return jax.jit(act).lower(params, *some)

  kernel = kernels.DECODING[jax.default_backend()]
  rows = len(key_B)
  programs = {
    'static batches': lowered(None, kernel, args.slots),
    f'slots, {kernel}': lowered(args.slots, kernel, rows),
    f'slots, {kernels.WHOLE}': lowered(args.slots, kernels.WHOLE, rows),
  }
  start = time.perf_counter()
  with concurrent.futures.ThreadPoolExecutor() as pool:
    ready = pool.map(lambda x: x.compile(), programs.values())
    done = dict(zip(programs, ready, strict=True))
  say(seconds_to_compile_all=time.perf_counter() - start)
  for name, program in done.items():
    temporary = program.memory_analysis().temp_size_in_bytes
    say(program=name, temporary_gib=temporary / 2**30)
  static = done.pop('static batches')
  return {
    'static batches': lambda: generation.static_batches(
      static, *arguments, args.slots
    )
  } | {k: functools.partial(act, *arguments) for k, act in done.items()}


def gap(config, args, params, experience):
  """Absolute differences of log-probabilities in sampling and scoring."""
  policy = language_model.policy(
    config, response_length=args.length, stop=(long_tail.STOP,)
  )

  @jax.jit
  def apart(params, x):
    logp = policy.evaluate(params, x.obs, x.action).logp
    return jnp.abs(logp - x.logp) * x.mask

  parts = [
    apart(params, jax.tree.map(lambda x: x[i : i + args.slots], experience))
    for i in range(0, len(experience.mask), args.slots)
  ]
  return np.concatenate(parts)


def main():
  """Prints lines of JSON: of the kernel, of compilation, and of each way."""
  allocator.claim_accelerators()
  args = parse()
  config = huggingface.load_config(args.model)
  config = dataclasses.replace(
    config, dtype='bfloat16', L=args.layers or config.L
  )
  say(device=jax.devices()[0].device_kind, jax=jax.__version__)
  for C in args.columns:
    time_kernels(config, args.slots, C)
  params = long_tail.params(config, args.median)
  prompt = long_tail.prompts(config, args.groups, args.group_size, args.prompt)
  key_B = jax.random.split(jax.random.key(0), args.groups * args.group_size)
  run = compiled(config, args, (params, prompt, key_B))
  found, spent = {}, {name: [] for name in run}
  for _ in range(args.rounds):
    for name, fn in run.items():
      start = time.perf_counter()
      found[name] = jax.block_until_ready(fn())
      spent[name].append(time.perf_counter() - start)
  for name, x in found.items():
    length_B = np.asarray(x.mask.sum(1))
    rates = length_B.sum() / np.array(spent[name])
    apart = gap(config, args, params, x)
    say(
      way=name,
      tokens_a_second=rates.round().tolist(),
      tokens=int(length_B.sum()),
      median=float(np.median(length_B)),
      p95=float(np.quantile(length_B, 0.95)),
      longest=int(length_B.max()),
      gap_mean=float(apart.sum() / length_B.sum()),
      gap_max=float(apart.max()),
    )


if __name__ == '__main__':
  main()
