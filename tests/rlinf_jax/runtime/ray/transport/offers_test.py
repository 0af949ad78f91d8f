"""Offered values go to those that have a ticket, once, and to no one else."""

import contextlib
import secrets
import socket
import threading
import time

import numpy as np
import pytest

import claims
import fuzz
from rlinf_jax.runtime.ray.transport import offers

HOST = '127.0.0.1'
SECRET = bytes(range(256)) * 64


@pytest.fixture(scope='module')
def server():
  return offers.Server(HOST)


def offer(server, value=SECRET):
  return server.offer(lambda write: write(memoryview(value)))


def pulled(ticket, value=SECRET):
  return offers.pull(ticket, len(value)).tobytes() == value


@pytest.mark.parametrize('size', [0, 1, 1 << 16, 10**7])
def test_a_value_arrives_as_it_was_offered(server, size):
  value = np.random.default_rng(0).bytes(size)
  data = offers.pull(offer(server, value), size)
  assert data.tobytes() == value
  assert data.ctypes.data % offers.ALIGNMENT == 0 or not size


def test_a_value_is_sent_once(server):
  ticket = offer(server)
  assert pulled(ticket)
  with pytest.raises(ConnectionError, match='does not offer a value any more'):
    offers.pull(ticket, len(SECRET))


def test_a_withdrawn_value_is_not_sent(server):
  ticket = offer(server)
  server.cancel()
  with pytest.raises(ConnectionError, match='does not offer a value any more'):
    offers.pull(ticket, len(SECRET))


def test_numbers_and_proofs_cannot_be_guessed(server):
  tickets = [offer(server) for _ in range(500)]
  texts = [x for ticket in tickets for x in (ticket.number, ticket.proof)]
  assert len({*texts}) == 1000
  # Every bit is set in half of them: 15 standard deviations are 237.
  bits = np.unpackbits(
    np.frombuffer(b''.join(texts), np.uint8).reshape(1000, -1)
  )
  assert np.all(np.abs(bits.reshape(1000, -1).sum(0).astype(int) - 500) < 237)
  guesses = [tickets[0].number[:-1], secrets.token_bytes(offers.BYTES)]
  guesses += [tickets[0].proof, bytes(offers.BYTES)]
  for guess in guesses:
    wrong = tickets[0]._replace(number=guess + bytes(16 - len(guess)))
    with pytest.raises(ConnectionError):
      offers.pull(wrong, len(SECRET))
  assert all(map(pulled, tickets[:3]))
  server.cancel()


def test_a_server_that_does_not_know_the_proof_is_refused(server):
  ticket = offer(server)._replace(proof=bytes(offers.BYTES))
  with pytest.raises(ConnectionError, match='Another process than the sender'):
    offers.pull(ticket, len(SECRET))


def test_a_port_that_nothing_listens_to_is_said():
  with socket.create_server((HOST, 0)) as free:
    port = free.getsockname()[1]
  ticket = offers.Ticket(HOST, port, bytes(offers.BYTES), bytes(offers.BYTES))
  with pytest.raises(
    ConnectionError, match=f'from {HOST} port {port}: .*refus'
  ):
    offers.pull(ticket, 1)


def test_a_sender_that_ends_in_the_middle_is_said(server):
  def send(write):
    write(memoryview(SECRET[:100]))
    raise BrokenPipeError

  ticket = server.offer(send)
  with pytest.raises(ConnectionError, match='was lost while a value of 16,384'):
    offers.pull(ticket, len(SECRET))


def ended(number):
  """Whether no more than a number of threads are left, within ten seconds."""
  end = time.monotonic() + 10
  while threading.active_count() > number and time.monotonic() < end:
    time.sleep(0.05)
  return threading.active_count() <= number


def silent(server, number, stack):
  """Opens connections that present nothing."""
  address = HOST, server.port
  return [
    stack.enter_context(socket.create_connection(address))
    for _ in range(number)
  ]


def test_silent_connections_push_no_receiver_out(monkeypatch):
  monkeypatch.setattr(offers, 'PATIENCE', 60.0)
  server, before = offers.Server(HOST), threading.active_count()
  with contextlib.ExitStack() as stack:
    silent(server, 4 * offers.STRANGERS, stack)
    ticket = offer(server)
    assert pulled(ticket)
    # Each that is pushed out has woken its thread, which then ends.
    assert ended(before + offers.STRANGERS + 1)
  assert ended(before)


def test_silent_connections_are_closed(monkeypatch):
  monkeypatch.setattr(offers, 'PATIENCE', 0.2)
  server, before = offers.Server(HOST), threading.active_count()
  with contextlib.ExitStack() as stack:
    for one in silent(server, 4, stack):
      one.settimeout(10)
      with contextlib.suppress(ConnectionResetError):
        assert one.recv(1) == b''
    assert ended(before)


def test_a_server_that_is_refused_a_thread_goes_on(server, monkeypatch):
  start, refused = threading.Thread.start, []

  def refuse_one(thread):
    if not refused:
      refused.append(thread)
      raise RuntimeError("can't start new thread")
    start(thread)

  monkeypatch.setattr(threading.Thread, 'start', refuse_one)
  assert pulled(offer(server)) and refused


@pytest.mark.parametrize('n', claims.some((200, 10_000), keep=(200,)))
def test_random_messages_obtain_nothing_and_stop_nothing(n, server):
  tickets = [offer(server) for _ in range(3)]
  where = [(server.host, server.port)]
  assert not any(fuzz.answers(where, n))
  # These messages abort the transport of JAX.
  for message in (bytes(4), bytes(4096), b'\xff' * 4):
    with socket.create_connection(where[0]) as one:
      with contextlib.suppress(OSError):  # It may be closed already.
        one.sendall(message)
        one.shutdown(socket.SHUT_WR)
        assert one.recv(1) == b''
  assert all(map(pulled, tickets))
