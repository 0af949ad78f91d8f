"""Partial rollouts of completions with slots, against static batches.

  python -m experiments.generation.carried

The lengths of completions have a long tail, see `long_tail`. Each step starts
new groups beside those that the last one has left unfinished, and stops when as
many groups have ended as it has started. All ways take the same steps with the
same parameters, and all rows that they return are compared: static batches,
slots, and slots that keep the keys and values of carried rows, as rounds of
DAPO may. Printed are the CPU-seconds of each, those of reading carried rows
again, and the tokens that slots draw and discard. The first step of a way
compiles, and is not counted; nothing is kept before it.
"""

import argparse
import functools
import json
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from experiments.generation import long_tail
from stages import base
from stages.language import language_model
from stages.language.decoding import prefill, stopping, unfinished
from stages.language.decoding.slots import slot_rows
from stages.language.partial_rollout import completions as partial_lib
from stages.models import transformer


class Counter:
  """Counts the tokens that slots discard."""

  def __init__(self):
    self.discarded = 0
    self._cut = stopping.cut

  def cut(self, completions, length_B, limit):
    kept = self._cut(completions, length_B, limit)
    jax.debug.callback(self._add, completions.mask.sum() - kept.mask.sum())
    return kept

  def _add(self, tokens):
    self.discarded += int(tokens)


def policy(args, slots=None) -> base.Policy:
  return language_model.policy(
    long_tail.SIZES[args.size],
    response_length=args.length,
    stop=(long_tail.STOP,),
    slots=slots,
  )


def problem(args, i) -> base.Problem:
  """Other prompts in each step: those of one step, in another order."""
  config = long_tail.SIZES[args.size]
  prompt = long_tail.prompts(config, args.groups, args.group_size, args.prompt)
  order = np.random.default_rng(i).permutation(args.groups)
  rows = np.arange(len(prompt.token)).reshape(args.groups, -1)[order].ravel()
  prompt = jax.tree.map(lambda x: jnp.asarray(x)[rows], prompt)
  return base.Problem(prompt, jnp.arange(len(rows)))


def encoder(args, slots):
  """Reads carried rows again as a step does: `params, carried -> arrays`."""
  config = long_tail.SIZES[args.size]
  model = transformer.Transformer(config)

  def run(params, carried):
    prompt, rows = carried.problem.prompt, carried.rows
    if slots is None:
      return unfinished.read(model, params, prompt, args.group_size, rows)
    split = prefill.split_prompt(prompt, args.group_size)
    B, T = rows.mask.shape
    is_open_B = rows.alive & (rows.mask.sum(1) < T)
    shape = (len(split.prompt_NP), config.K, args.prompt, config.W)
    layers = [({}, jnp.zeros(shape), jnp.zeros(shape))] * config.L
    _, state = slot_rows.empty(config, layers, split, B, rows)
    queue = slot_rows.Queue(jnp.argsort(~is_open_B, stable=True), B)
    count = is_open_B.sum(dtype=jnp.int32)
    more = {'count': count, 'most': B}
    given = model, params, layers, split, rows, queue, state
    return unfinished.into_slots(*given, **more).slots.caches

  return jax.jit(run)


def spend(fn, *args):
  """Returns the result of a call, and its CPU-seconds."""
  start = time.process_time()
  out = jax.block_until_ready(fn(*args))
  return out, time.process_time() - start


def parse():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--size', choices=long_tail.SIZES, default='3.5M')
  parser.add_argument('--slots', type=int, nargs='+', default=[16])
  parser.add_argument('--groups', type=int, default=16)
  parser.add_argument('--extra_groups', type=int, default=2)
  parser.add_argument('--group_size', type=int, default=8)
  parser.add_argument('--prompt', type=int, default=32)
  parser.add_argument('--median', type=float, default=12)
  parser.add_argument('--length', type=int, default=256)
  parser.add_argument('--steps', type=int, default=5)
  return parser.parse_args()


def same(got, want):
  """Asserts that all rows are the same, to rounding of log-probabilities."""
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    if jnp.issubdtype(x.dtype, jnp.floating):
      np.testing.assert_allclose(x, y, rtol=0, atol=1e-4)
    else:
      np.testing.assert_array_equal(x, y)


def main():
  args = parse()
  params = long_tail.params(long_tail.SIZES[args.size], args.median)
  carried = partial_lib.allocate(
    policy(args), problem(args, 0), args.group_size, args.extra_groups
  )
  counter, actor = Counter(), base.Version(params, jnp.int32(0))
  patch = mock.patch.object(stopping, 'cut', counter.cut)
  step = {
    slots: jax.jit(
      functools.partial(
        partial_lib.continue_, policy(args, slots), args.group_size, 2
      )
    )
    for slots in (None, *args.slots)
  }
  read = {slots: encoder(args, slots) for slots in step}
  rows = args.extra_groups * args.group_size
  kept = {slots: policy(args, slots).empty_kept(rows) for slots in args.slots}
  ways = [(slots, keeps) for slots in step for keeps in (False, True)]
  ways.remove((None, True))
  for i in range(args.steps):
    key_B = jax.random.split(jax.random.key(i), args.groups * args.group_size)
    found, results = {'step': i}, {}
    before = int(carried.rows.mask.sum())
    # The order alternates.
    for slots, keeps in ways[:: 1 - 2 * (i % 2)]:
      counter.discarded = 0
      given = carried._replace(kept=kept[slots]) if keeps else carried
      _, reading = spend(read[slots], params, carried)
      with patch:
        made, spent = spend(step[slots], actor, given, problem(args, i), key_B)
        jax.effects_barrier()
      name = 'static' if slots is None else f'{slots} slots'
      name += ', kept' if keeps else ''
      found[name] = {'seconds': spent}
      if not keeps:
        found[name]['reading'] = reading
      if keeps:
        kept[slots] = made[2].kept
        made = *made[:2], made[2]._replace(kept=())
      if slots is not None:
        found[name]['discarded'] = counter.discarded
      results[slots, keeps] = made
    want = results[None, False]
    for got in results.values():
      same(got, want)
    _, x, rest = want
    drawn = int(x.mask.sum() + rest.rows.mask.sum()) - before
    found |= {'carried': before, 'drawn': drawn}
    print(json.dumps(found), flush=True)
    carried = rest


if __name__ == '__main__':
  main()
