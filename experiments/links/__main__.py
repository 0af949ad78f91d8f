"""Seconds to send a value between two processes, by size and by transport.

  python -m experiments.links

Each size is sent in three ways, one after the other: pulled through our
`Channels`; pulled with `jax.experimental.transfer`; and as `Channels` sends it
between processors of one machine. Time runs from the offer to the arrival.
"""

import json
import statistics
import time

import jax
from jax.experimental import transfer
import jax.numpy as jnp
import ray

from rlinf_jax.runtime.ray.transport import channel

SIZES = 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 100 * 10**6
ROUNDS = 9
ADDRESS = '127.0.0.1:0'
STREAMS = 2  # Of a bare transfer: one does not fill a link.


class End:
  """A process that sends and receives in each of the three ways."""

  def __init__(self):
    self.channels = channel.Channels('127.0.0.1')
    self.bare = transfer.start_transfer_server(
      jax.devices()[0].client, ADDRESS, [ADDRESS] * STREAMS
    )
    self.number, self.connection = 0, None

  def make(self, size: int):
    """Makes the array of `size` bytes that `offer` sends from now on."""
    self.x = jnp.arange(size // 4, dtype=jnp.int32)

  def address(self):
    return self.bare.address()

  def offer(self, how: str):
    """Sends the array; returns the time and what the receiver needs."""
    start = time.time()
    if how == 'bare':
      self.number += 1
      self.bare.await_pull(self.number, [self.x])
      return start, self.number
    return start, self.channels.pack(self.x, how == 'near')

  def take(self, how: str, offered, address, size: int):
    """Receives the array; returns the seconds since it was offered."""
    start, sent = offered
    layout = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if how == 'bare':
      self.connection = self.connection or self.bare.connect(address)
      shape = jax.ShapeDtypeStruct((size // 4,), jnp.int32, sharding=layout)
      (x,) = self.connection.pull(sent, [shape])
    else:
      x = self.channels.unpack(sent, layout)
    jax.block_until_ready(x)
    return time.time() - start


def main():
  ray.init('local', log_to_driver=False, logging_level='error')
  environment = {'env_vars': {'JAX_PLATFORMS': 'cpu'}}
  actor = ray.remote(End).options(num_cpus=1, runtime_env=environment)
  sender, receiver = actor.remote(), actor.remote()
  address = ray.get(sender.address.remote())
  rows = []
  for size in SIZES:
    ray.get(sender.make.remote(size))
    seconds = {'pulled': [], 'bare': [], 'near': []}
    for i in range(ROUNDS + 1):
      for how, measured in seconds.items():
        offered = sender.offer.remote(how)
        spent = ray.get(receiver.take.remote(how, offered, address, size))
        if i:  # The first round connects.
          measured.append(spent)
    medians = {how: statistics.median(spent) for how, spent in seconds.items()}
    rows.append({'bytes': size} | medians)
    line = '  '.join(f'{how} {1e3 * x:8.2f} ms' for how, x in medians.items())
    print(f'{size:>10,} bytes  {line}', flush=True)
  last = rows[-1]
  print(json.dumps(rows))
  ratios = [last['bare'] / last[how] for how in ('pulled', 'near')]
  print('figure: {:.1f} times its bandwidth; {:.1f} times'.format(*ratios))


if __name__ == '__main__':
  main()
