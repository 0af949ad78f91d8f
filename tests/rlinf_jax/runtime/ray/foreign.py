"""A process of another run, which guesses the numbers of offers.

  python -m tests.rlinf_jax.runtime.ray.foreign ADDRESS NUMBER...

It prints the numbers under which it obtains 1,024 numbers of type float32.
"""

import os
import sys
import time

import jax

from rlinf_jax.runtime.ray import channel

WAIT = 2.0  # Seconds; an offer that exists is pulled in milliseconds.


def main(address, *numbers):
  ends = channel.Channels('127.0.0.1')
  layout = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  pulled = {
    n: ends.unpack(
      channel.Offer(address, int(n), (1024,), 'float32', ()), layout
    )
    for n in numbers
  }
  time.sleep(WAIT)
  print(*(n for n, x in pulled.items() if x.is_ready()), flush=True)
  os._exit(0)  # The others are still awaited.


if __name__ == '__main__':
  main(*sys.argv[1:])
