"""One has the devices at a time; the dead are in nobody's way."""

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
from rlinf_jax.runtime import lease as lease_lib

ROOT = pathlib.Path(__file__).parents[3]
# Takes and lets go, and writes down when; or keeps what it has, or waits.
CHILD = """
import json, sys, time
from rlinf_jax.runtime import lease
folder, name, rank, times, keeps = sys.argv[1:]
mine, held = lease.Lease(folder, name, int(rank)), []
print('here', flush=True)
for _ in range(int(times)):
  mine.acquire(30)
  begin = time.monotonic_ns()
  time.sleep(float(keeps))
  held.append((begin, time.monotonic_ns()))
  mine.release()
print(json.dumps(held), flush=True)
"""


@contextlib.contextmanager
def child(folder, name, rank=0, times=1, keeps=0.0):
  """A process that shares; ends it if need be."""
  args = map(str, (folder, name, rank, times, keeps))
  made = subprocess.Popen(
    [sys.executable, '-S', '-c', CHILD, *args],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    assert made.stdout.readline() == 'here\n'
    yield made
  finally:
    made.kill()
    made.wait()
    made.stdout.close()


def until(true, seconds=5.0):
  end = time.monotonic() + seconds
  while not true():
    assert time.monotonic() < end, 'It did not happen.'
    time.sleep(0.002)


def waiting(folder):
  return len(os.listdir(folder / 'queue'))


def ask(lease, order, name):
  """Asks in a thread of its own; notes when it has its turn, and lets go."""

  def run():
    lease.acquire(10)
    order.append(name)
    lease.release()

  thread = threading.Thread(target=run)
  thread.start()
  return thread


def test_processes_never_have_it_at_once(tmp_path):
  with contextlib.ExitStack() as stack:
    made = [
      stack.enter_context(child(tmp_path, f'p{i}', i % 2, 40)) for i in range(4)
    ]
    told = [json.loads(one.stdout.readline()) for one in made]
  held = sorted(tuple(span) for spans in told for span in spans)
  assert len(held) == 4 * 40
  assert all(a[1] < b[0] for a, b in zip(held, held[1:], strict=False))
  assert waiting(tmp_path) == 0


def test_rank_goes_before_waiting_and_waiting_before_nothing(tmp_path):
  first, order, threads = lease_lib.Lease(tmp_path, 'first', 5), [], []
  first.acquire()
  ranks = [2, 1, 2, 0, 1]
  for i, rank in enumerate(ranks):
    threads.append(ask(lease_lib.Lease(tmp_path, f'{i}', rank), order, i))
    until(lambda: waiting(tmp_path) == len(threads))
  first.release()
  # Who lets go and asks again is behind those of its rank.
  for thread in threads:
    thread.join()
  assert order == [3, 1, 4, 0, 2]


def test_who_lets_go_and_asks_again_lets_its_equals_have_it(tmp_path):
  one, other = (lease_lib.Lease(tmp_path, name, 0) for name in 'ab')
  order = []
  one.acquire()
  thread = ask(other, order, 'b')
  until(lambda: waiting(tmp_path) == 1)
  one.release()
  one.acquire(10)
  order.append('a')
  one.release()
  thread.join()
  assert order == ['b', 'a']


def test_a_killed_owner_has_nothing_and_is_soon_followed(tmp_path):
  mine = lease_lib.Lease(tmp_path, 'mine', 0)
  with child(tmp_path, 'theirs', keeps=60) as owner:
    until(lambda: mine.owner().startswith('theirs'))
    with pytest.raises(TimeoutError, match=rf'theirs \(process {owner.pid}\)'):
      mine.acquire(0.05)
    os.kill(owner.pid, signal.SIGKILL)
    start = time.monotonic()
    mine.acquire(5)
    assert time.monotonic() - start < 1
  mine.release()


def test_who_is_killed_while_it_waits_keeps_nobody_waiting(tmp_path):
  one, mine = (lease_lib.Lease(tmp_path, name, 3) for name in 'ab')
  one.acquire()
  with child(tmp_path, 'theirs', rank=0) as other:
    until(lambda: waiting(tmp_path) == 1)
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    one.release()
    mine.acquire(1)
    mine.release()
  assert waiting(tmp_path) == 0


def test_a_child_that_outlives_its_parent_has_nothing_of_it(tmp_path):
  code = (
    'import os, sys, time\n'
    'from rlinf_jax.runtime import lease\n'
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
    mine.acquire(1)
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


def test_nobody_takes_it_twice(tmp_path):
  mine = lease_lib.Lease(tmp_path, 'mine', 0)
  mine.acquire()
  with pytest.raises(RuntimeError, match='mine holds the devices already'):
    mine.acquire()
  mine.release()
  mine.release()  # What it has not got it need not let go.


def test_a_plan_says_who_shares_and_who_is_first(tmp_path):
  places = {
    name: plan_lib.Placement((device,))
    for name, device in (('a', 0), ('b', 0), ('c', 1), ('d', 2), ('e', 2))
  }
  plan = plan_lib.Plan(places, {}, shared_devices=('b', 'e', 'd', 'a'))
  made = lease_lib.of_plan(plan, tmp_path, plan.places)
  ranks = {name: one.rank for name, one in made.items()}
  assert ranks == {'b': 0, 'e': 1, 'd': 2, 'a': 3}
  made['a'].acquire()
  made['d'].acquire(0.1)  # Other devices.
  with pytest.raises(TimeoutError, match="Place 'b' waited .* Place 'a'"):
    made['b'].acquire(0.02)
  made['a'].release()
  made['d'].release()
