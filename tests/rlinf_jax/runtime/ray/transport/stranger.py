"""A process that knows no secret of a run, and speaks to its ports.

  python -m tests.rlinf_jax.runtime.ray.transport.stranger HOST:PORT...

To each port it sends noise and the first messages of protocols, one a
connection, and prints as hexadecimal digits what it receives.
"""

from concurrent import futures
import contextlib
import random
import socket
import struct
import sys

SILENCE = 1.0  # Seconds until it expects no more.
MOST = 1 << 22  # Bytes that it receives from a connection.
MESSAGES = (
  b'',
  random.Random(0).randbytes(4096),
  b'GET / HTTP/1.1\r\nHost: localhost\r\n\r\n',
  # The beginning of gRPC, with empty settings.
  b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + b'\0\0\0\4\0\0\0\0\0',
  bytes(4),
  # Numbers, as those of gloo's ranks, and as tickets of offers.
  *(struct.pack('<Q', number) for number in (0, 1, 2, 3, 64)),
  bytes(16),
)


def answer(at: str, message: bytes) -> bytes:
  """Sends a message to a port; returns its answer."""
  host, port = at.rsplit(':', 1)
  received = b''
  with contextlib.suppress(OSError):  # It closes the connection, or is silent.
    with socket.create_connection((host, int(port)), SILENCE) as one:
      one.sendall(message)
      while len(received) < MOST and (part := one.recv(1 << 16)):
        received += part
  return received


def main(*addresses):
  pairs = [(at, x) for at in addresses for x in MESSAGES]
  with futures.ThreadPoolExecutor(16) as pool:
    for received in pool.map(lambda pair: answer(*pair), pairs):
      print(received.hex(), flush=True)


if __name__ == '__main__':
  main(*sys.argv[1:])
