"""A process that checks new connections by probes, which it reads from stdin.

For each list of probes it prints 'checked', or why the check fails.
"""

import os
import pickle
import sys

from rlinf_jax.runtime.ray import channel


def main():
  channel.PROBE_TIMEOUT = 3.0
  ends = channel.Channels('127.0.0.1')
  while probes := pickle.load(sys.stdin.buffer):
    try:
      ends.check(probes)
      print('checked', flush=True)
    except RuntimeError as error:
      print(error, flush=True)
  os._exit(0)  # A stream that was taken may still be read from.


if __name__ == '__main__':
  main()
