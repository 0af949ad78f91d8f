r"""Counts what slots would save by reading their keys and values in parts.

  python -m experiments.generation.ring_parts
  python -m experiments.generation.ring_parts --compile h100:1x1x1

The first command draws lengths of completions and prints the share of the
ring's columns that iterations would read, in parts that end with the newest
column and reach back to the first token of the oldest unfinished row. The
second one compiles attention of one layer in a decoding loop for a device that
need not be here, and prints its temporary memory and the bytes that XLA counts:

  whole   all columns of one array are read, as now
  indexed one or two of four parts of one array, by the number of the newest
  shifted one to four arrays, moved on by one place whenever the first is full
"""

import argparse
from collections.abc import Callable
import json

import jax
import jax.numpy as jnp
import numpy as np

from rlinf_jax.planning.compiled import topology as topology_lib
from stages.language.decoding import kv_cache
from stages.models import transformer

# Rows, slots, most tokens, their median, and the 95th percentile over it.
CASES = {
  '256 tokens': (256, 32, 256, 12, 8),
  '1,024 tokens': (512, 64, 1024, 100, 4),
  '8,192 tokens': (512, 64, 8192, 1500, 4),
  '8,192 tokens, more short rows': (2048, 128, 8192, 600, 8),
}
Z95 = 1.645  # The 95th percentile of a normal distribution.
# Slots, key heads, queries of each, their size; columns in parts.
M, K, J, W = 64, 4, 7, 128
PARTS, COLUMNS = 4, 2048


def draw(rng, rows: int, most: int, median: float, ratio: float) -> np.ndarray:
  """Lengths of rows, log-normal."""
  sigma = np.log(ratio) / Z95
  lengths = np.ceil(median * np.exp(sigma * rng.normal(size=rows)))
  return np.minimum(lengths, most).astype(int)


def reaches(lengths: np.ndarray, slots: int) -> np.ndarray:
  """By iteration, the age of the oldest token of an unfinished row."""
  waiting = iter(lengths)
  # First iteration and length of the row in each slot.
  rows = [(0, n) for _, n in zip(range(slots), waiting)]  # noqa: B905
  found = []
  while rows:
    now = len(found)
    found.append(now - min(start for start, _ in rows))
    open_ = [row for row in rows if now + 1 - row[0] < row[1]]
    ended = len(rows) - len(open_)
    rows = open_ + [(now + 1, n) for _, n in zip(range(ended), waiting)]  # noqa: B905
  return np.array(found)


def share(reach: np.ndarray, most: int, parts: int) -> float:
  """The share of the columns that iterations would read, on average."""
  columns = -(-most // parts)
  newest = np.arange(len(reach)) % columns
  older = np.ceil(np.maximum(reach - newest, 0) / columns)
  return float((np.minimum(1 + older, parts) / parts).mean())


def simulate():
  """Prints the shares of all cases, as JSON."""
  rng = np.random.default_rng(0)
  for name, (rows, slots, most, median, ratio) in CASES.items():
    reach = reaches(draw(rng, rows, most, median, ratio), slots)
    shares = {n: round(share(reach, most, n), 2) for n in (2, 4, 8)}
    print(json.dumps({'case': name, 'read': shares}))


def attend(q, parts, masks):
  """Attention of one query a slot to some parts of the ring."""
  config = transformer.Config(
    V=1, D=J * K * W, L=1, H=J * K, K=K, W=W, F=1, dtype='bfloat16'
  )
  least = jnp.full((M, K, J), jnp.finfo(jnp.float32).min / 2)
  softmax = kv_cache.Softmax(
    least, jnp.zeros_like(least), jnp.zeros(q.shape, jnp.float32)
  )
  for part, mask in zip(parts, masks, strict=True):
    softmax = kv_cache._read(config, q, softmax, part, mask)
  return (softmax.seen / softmax.total[..., None]).astype(q.dtype)


def written(part, q, column):
  """The part with a new column, for which the query stands."""
  return kv_cache.LayerCache(
    *(
      jax.lax.dynamic_update_slice_in_dim(x, q[:, :, :1], column, 2)
      for x in part
    )
  )


def seen(t, start_M, ages):
  """Which columns of these ages belong to the row of each slot."""
  return (ages[None] >= 0) & (ages[None] <= (t - start_M)[:, None])


def whole(ring, q, start_M, stop):
  """Reads all columns."""

  def body(state):
    t, q, ring = state
    all_columns = PARTS * COLUMNS
    ring = written(ring, q, t % all_columns)
    ages = (t - jnp.arange(all_columns)) % all_columns
    return t + 1, attend(q, [ring], [seen(t, start_M, ages)]), ring

  return jax.lax.while_loop(lambda state: state[0] < stop, body, (0, q, ring))


def indexed(count: int) -> Callable:
  """Reads `count` parts of one array [parts, slots, heads, columns, W]."""

  def run(ring, q, start_M, stop):
    def body(state):
      t, q, ring = state
      column, newest = t % COLUMNS, t // COLUMNS % PARTS

      def at(i):
        part = (newest - i) % PARTS
        slices = (jax.lax.dynamic_index_in_dim(x, part, 0, False) for x in ring)
        return kv_cache.LayerCache(*slices)

      ring = kv_cache.LayerCache(
        *(
          jax.lax.dynamic_update_slice(
            x, q[None, :, :, :1], (newest, 0, 0, column, 0)
          )
          for x in ring
        )
      )
      ages = [column - jnp.arange(COLUMNS) + i * COLUMNS for i in range(count)]
      masks = [seen(t, start_M, some) for some in ages]
      return t + 1, attend(q, [at(i) for i in range(count)], masks), ring

    return jax.lax.while_loop(lambda state: state[0] < stop, body, (0, q, ring))

  return run


def shifted(parts, q, start_M, stop):
  """Reads parts at fixed places, in a loop for each number of them."""

  def body(count, state):
    t, q, (first, *rest) = state
    first, column = written(first, q, t % COLUMNS), t % COLUMNS
    ages = [column - jnp.arange(COLUMNS) + i * COLUMNS for i in range(count)]
    masks = [seen(t, start_M, some) for some in ages]
    q = attend(q, [first, *rest][:count], masks)
    return t + 1, q, (first, *rest)

  def fill(state):
    end = (state[0] // COLUMNS + 1) * COLUMNS
    # Within a part, older ones are only needed less.
    for count in range(PARTS, 0, -1):

      def condition(state, least=(count - 2) * COLUMNS):
        t = state[0]
        older = (t - start_M).max() - t % COLUMNS
        return (t < stop) & (t < end) & (older > least)

      def extend(state, count=count):
        return body(count, state)

      state = jax.lax.while_loop(condition, extend, state)
    t, q, parts = state
    return t, q, (parts[0], *parts[:-1])

  return jax.lax.while_loop(lambda state: state[0] < stop, fill, (0, q, parts))


def compiled(name: str):
  """Prints temporary MiB and bytes of each way, as JSON.

  Args:
    name: of a topology, of which the first device is compiled for.
  """
  topology = topology_lib.parse(name)
  topology_lib.prepare(topology)
  on = jax.sharding.SingleDeviceSharding(topology_lib.devices(topology)[0])

  def like(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=on)

  def cache(*shape):
    return kv_cache.LayerCache(like(*shape, W), like(*shape, W))

  stacked = cache(PARTS, M, K, COLUMNS)
  ways = {
    'whole': (whole, cache(M, K, PARTS * COLUMNS)),
    'indexed, 1 of 4': (indexed(1), stacked),
    'indexed, 2 of 4': (indexed(2), stacked),
    'shifted': (shifted, (cache(M, K, COLUMNS),) * PARTS),
  }
  numbers = like(M, dtype=jnp.int32), like(dtype=jnp.int32)
  for way, (run, ring) in ways.items():
    jitted = jax.jit(run, donate_argnums=0, out_shardings=on)
    found = jitted.lower(ring, like(M, K, J, W), *numbers).compile()
    counted = found.cost_analysis() or {}  # GPUs' compiler counts nothing.
    temporary = found.memory_analysis().temp_size_in_bytes
    facts = {'way': way, 'temporary MiB': round(temporary / 2**20)}
    if size := counted.get('bytes accessed'):
      facts['MiB of an iteration'] = round(size / 2**20)
    print(json.dumps(facts), flush=True)


def main():
  """Simulates, or compiles for a topology."""
  parser = argparse.ArgumentParser()
  parser.add_argument('--compile', metavar='TOPOLOGY')
  args = parser.parse_args()
  compiled(args.compile) if args.compile else simulate()


if __name__ == '__main__':
  main()
