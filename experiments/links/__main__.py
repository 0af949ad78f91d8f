"""Bandwidth between two processes, by size and by way.

  python -m experiments.links

Each size is pulled by our links and by a bare `jax.experimental.transfer`, and
goes as our links take it between processors of one machine, in turns. Seconds
are from the offer to when it is there.
"""

import json
import statistics
import time

import jax
from jax.experimental import transfer
import jax.numpy as jnp
import ray

from rlinf_jax.runtime.ray import channel

SIZES = 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 100 * 10**6
ROUNDS = 9
ADDRESS = '127.0.0.1:0'


class End:
  """A process with both kinds of link."""

  def __init__(self):
    self.links = channel.Channels('127.0.0.1')
    self.bare = transfer.start_transfer_server(
      jax.devices()[0].client, ADDRESS, [ADDRESS] * channel.STREAMS
    )
    self.number, self.peer = 0, None

  def make(self, size: int):
    """What is sent from now on."""
    self.x = jnp.arange(size // 4, dtype=jnp.int32)

  def address(self):
    return self.bare.address()

  def offer(self, how: str):
    """Sends: what the other end needs to have it, and when that began."""
    start = time.time()
    if how == 'bare':
      self.number += 1
      self.bare.await_pull(self.number, [self.x])
      return start, self.number
    return start, self.links.pack(self.x, (), how == 'near')

  def take(self, how: str, offered, address, size: int):
    """Seconds until it is there."""
    start, sent = offered
    layout = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if how == 'bare':
      self.peer = self.peer or self.bare.connect(address)
      like = jax.ShapeDtypeStruct((size // 4,), jnp.int32, sharding=layout)
      (x,) = self.peer.pull(sent, [like])
    else:
      x = self.links.unpack(sent, layout)
    jax.block_until_ready(x)
    return time.time() - start


def main():
  ray.init('local', log_to_driver=False, logging_level='error')
  environment = {'env_vars': {'JAX_PLATFORMS': 'cpu'}}
  made = ray.remote(End).options(num_cpus=1, runtime_env=environment)
  one, other = made.remote(), made.remote()
  address = ray.get(one.address.remote())
  rows = []
  for size in SIZES:
    ray.get(one.make.remote(size))
    took = {'pulled': [], 'bare': [], 'near': []}
    for turn in range(ROUNDS + 1):
      for how, spent in took.items():
        offered = one.offer.remote(how)
        seconds = ray.get(other.take.remote(how, offered, address, size))
        if turn:  # The first connects.
          spent.append(seconds)
    rows.append(
      {'bytes': size}
      | {how: statistics.median(spent) for how, spent in took.items()}
    )
    told = '  '.join(f'{how} {1e3 * rows[-1][how]:8.2f} ms' for how in took)
    print(f'{size:>10,} bytes  {told}', flush=True)
  last = rows[-1]
  print(f'100 MB: {last["bare"] / last["pulled"]:.2f} of the bare bandwidth')
  print(json.dumps(rows))


if __name__ == '__main__':
  main()
