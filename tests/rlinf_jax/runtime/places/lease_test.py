"""Leases exclude each other, and a dead process loses its lease."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from planner.ir import plan as plan_lib
from rlinf_jax.runtime.places import lease as lease_lib

ROOT = pathlib.Path(__file__).parents[4]
# Acquires and releases a lease some times, and prints when it held it.
CHILD = """
import json, sys, time
from rlinf_jax.runtime.places import lease
folder, name, rank, times, seconds = sys.argv[1:]
mine, held = lease.Lease(folder, name, int(rank)), []
print('ready', flush=True)
for _ in range(int(times)):
  mine.acquire(30)
  begin = time.monotonic_ns()
  time.sleep(float(seconds))
  held.append((begin, time.monotonic_ns()))
  mine.release()
print(json.dumps(held), flush=True)
"""


@contextlib.contextmanager
def child(folder, name, rank=0, times=1, seconds=0.0):
  """A process that runs CHILD; killed at the end."""
  args = map(str, (folder, name, rank, times, seconds))
  process = subprocess.Popen(
    [sys.executable, '-S', '-c', CHILD, *args],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    assert process.stdout.readline() == 'ready\n'
    yield process
  finally:
    process.kill()
    process.wait()
    process.stdout.close()


def until(true, seconds=60.0):
  end = time.monotonic() + seconds
  while not true():
    assert time.monotonic() < end, 'The condition was not met in time.'
    time.sleep(0.002)


def waiting(folder):
  return len(os.listdir(folder / 'queue'))


def acquire_in_thread(lease, order, name):
  """Acquires a lease in a thread, appends `name` to `order`, releases it."""

  def run():
    lease.acquire(10)
    order.append(name)
    lease.release()

  thread = threading.Thread(target=run)
  thread.start()
  return thread


def test_processes_never_hold_a_lease_at_the_same_time(tmp_path):
  with contextlib.ExitStack() as stack:
    processes = [
      stack.enter_context(child(tmp_path, f'p{i}', i % 2, 40)) for i in range(4)
    ]
    lists = [json.loads(one.stdout.readline()) for one in processes]
  spans = sorted(tuple(span) for some in lists for span in some)
  assert len(spans) == 4 * 40
  assert all(a[1] < b[0] for a, b in zip(spans, spans[1:], strict=False))
  assert waiting(tmp_path) == 0


def test_a_lease_goes_to_the_smallest_rank_then_to_the_longest_wait(tmp_path):
  first, order, threads = lease_lib.Lease(tmp_path, 'first', 5), [], []
  first.acquire()
  ranks = [2, 1, 2, 0, 1]
  for i, rank in enumerate(ranks):
    threads.append(
      acquire_in_thread(lease_lib.Lease(tmp_path, f'{i}', rank), order, i)
    )
    until(lambda: waiting(tmp_path) == len(threads))
  first.release()
  for thread in threads:
    thread.join()
  assert order == [3, 1, 4, 0, 2]


def test_releasing_and_acquiring_again_queues_behind_the_same_rank(tmp_path):
  one, other = (lease_lib.Lease(tmp_path, name, 0) for name in 'ab')
  order = []
  one.acquire()
  thread = acquire_in_thread(other, order, 'b')
  until(lambda: waiting(tmp_path) == 1)
  one.release()
  one.acquire(10)
  order.append('a')
  one.release()
  thread.join()
  assert order == ['b', 'a']


def test_a_killed_owner_loses_its_lease_at_once(tmp_path):
  mine = lease_lib.Lease(tmp_path, 'mine', 0)
  with child(tmp_path, 'theirs', seconds=60) as owner:
    until(lambda: mine.owner().startswith('theirs'))
    with pytest.raises(TimeoutError, match=rf'theirs \(process {owner.pid}\)'):
      mine.acquire(0.05)
    os.kill(owner.pid, signal.SIGKILL)
    mine.acquire(30)  # It would have held it for a minute.
  mine.release()


def test_a_process_killed_while_it_waits_blocks_no_other(tmp_path):
  one, mine = (lease_lib.Lease(tmp_path, name, 3) for name in 'ab')
  one.acquire()
  with child(tmp_path, 'theirs', rank=0) as other:
    until(lambda: waiting(tmp_path) == 1)
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    one.release()
    mine.acquire(30)
    mine.release()
  assert waiting(tmp_path) == 0


def test_a_forked_child_does_not_hold_its_parents_lease(tmp_path):
  code = (
    'import os, sys, time\n'
    'from rlinf_jax.runtime.places import lease\n'
    'mine = lease.Lease(sys.argv[1], "parent", 0)\n'
    'mine.acquire()\n'
    'child = os.fork()\n'
    'print(child or "", end="", flush=True)\n'
    'time.sleep(60)\n'
  )
  parent = subprocess.Popen(
    [sys.executable, '-S', '-c', code, str(tmp_path)],
    cwd=ROOT,
    stdout=subprocess.PIPE,
  )
  pid = int(parent.stdout.read1())
  try:
    mine = lease_lib.Lease(tmp_path, 'mine', 0)
    with pytest.raises(TimeoutError, match='parent'):
      mine.acquire(0.02)
    parent.kill()
    parent.wait()
    mine.acquire(30)
    mine.release()
  finally:
    os.kill(pid, signal.SIGKILL)
    parent.stdout.close()


def test_a_failure_ends_the_wait(tmp_path):
  one, mine = (lease_lib.Lease(tmp_path, name, 0) for name in 'ab')
  one.acquire()
  with pytest.raises(LookupError, match='it is away'):
    mine.acquire(5, lambda: LookupError('it is away'))
  assert waiting(tmp_path) == 0 and not mine.held
  one.release()


def test_acquiring_twice_is_refused(tmp_path):
  mine = lease_lib.Lease(tmp_path, 'mine', 0)
  mine.acquire()
  with pytest.raises(RuntimeError, match='mine holds the devices already'):
    mine.acquire()
  mine.release()
  mine.release()  # Releasing without holding does nothing.


def test_a_plan_gives_the_shared_devices_and_the_ranks(tmp_path):
  places = {
    name: plan_lib.Placement((device,))
    for name, device in (('a', 0), ('b', 0), ('c', 1), ('d', 2), ('e', 2))
  }
  plan = plan_lib.Plan(places, {}, shared_devices=('b', 'e', 'd', 'a'))
  leases = lease_lib.of_plan(plan, tmp_path, plan.places)
  ranks = {name: one.rank for name, one in leases.items()}
  assert ranks == {'b': 0, 'e': 1, 'd': 2, 'a': 3}
  leases['a'].acquire()
  leases['d'].acquire(0.1)  # Other devices.
  with pytest.raises(TimeoutError, match="Place 'b' waited .* Place 'a'"):
    leases['b'].acquire(0.02)
  leases['a'].release()
  leases['d'].release()
