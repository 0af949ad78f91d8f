"""A RayRuntime goes on after failures and deaths, with the same bits."""

import contextlib
import functools
import itertools
import os
import re
import signal
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import claims
import in_memory
import local_ray
from rlinf_jax.runtime.base import ProcessDiedError, StageError
import saved
from tests.rlinf_jax.runtime.ray import driver_test
import tiny

pytestmark = pytest.mark.slow
cluster, runtimes = local_ray.cluster, driver_test.runtimes
SLOW = driver_test.SLOW


@pytest.fixture(scope='module')
def pair():
  """A RayRuntime and a LocalRuntime of two places."""
  remote, local_ = driver_test.of_plan(driver_test.PAIR, driver_test.simple)
  yield remote, local_
  remote.close()
  local_.close()


def test_a_failure_names_place_stage_and_step_until_a_state_is_loaded(pair):
  remote, _ = pair
  remote.start(driver_test.first())
  assert remote.step(driver_test.batch(1), driver_test.KEY) == 8
  for _ in range(2):
    with pytest.raises(
      StageError, match=r"Stage check on place 'b' failed in step 2.*than ten"
    ):
      remote.step(driver_test.batch(9), driver_test.KEY)
    with pytest.raises(StageError, match='step 2'):  # The failure is sticky.
      remote.step(driver_test.batch(1), driver_test.KEY)
    remote.start(driver_test.first(1.0), 1)
  assert remote.step(driver_test.batch(2), driver_test.KEY) == 16
  assert saved.state_of(remote) == 17


def test_the_death_of_a_process_with_state_is_reported_in_seconds(pair):
  remote, _ = pair
  remote.start(driver_test.first())
  assert remote.step(driver_test.batch(1), driver_test.KEY) == 8
  future = remote.submit(driver_test.batch(SLOW), driver_test.KEY)
  time.sleep(1)
  start = time.monotonic()
  os.kill(remote.processes()['a']['pid'], signal.SIGKILL)
  with pytest.raises(StageError, match="process of place 'a' has died"):
    future.result(timeout=60)
  assert time.monotonic() - start < 12  # Before the sleep ends.
  remote.start(driver_test.first(1.0), 1)  # Starts the process again.
  assert remote.step(driver_test.batch(2), driver_test.KEY) == 16
  assert saved.state_of(remote) == 17


def test_a_process_that_dies_without_state_is_replaced_in_seconds(pair):
  remote, _ = pair
  remote.start(driver_test.first())
  assert remote.step(driver_test.batch(1), driver_test.KEY) == 8
  before = remote.processes()['b']['pid']
  future = remote.submit(driver_test.batch(SLOW), driver_test.KEY)
  time.sleep(1)
  os.kill(before, signal.SIGKILL)
  assert future.result(timeout=60) == 8 * SLOW
  assert saved.state_of(remote) == 8 * SLOW + 8
  (line,) = remote.notices()
  assert "place 'b' has died in step 2 and was replaced in " in line
  assert remote.processes()['b']['pid'] != before
  assert remote.step(driver_test.batch(1), driver_test.KEY) == 8


STEPS = 6


def kill(remote, place):
  with contextlib.suppress(ProcessLookupError):
    os.kill(remote.processes()[place]['pid'], signal.SIGKILL)


def survive(remote, rng, victims, kills):
  """Runs steps while processes are killed; keeps every second state.

  Returns:
    The info of each step, the last state, how many deaths stopped the run, and
    the notices of those that did not.
  """
  states, infos, died, notices = [0.0], [], 0, []
  remote.start(driver_test.first())
  while len(infos) < STEPS:
    timer = None
    if died + len(notices) < kills:
      timer = threading.Timer(
        rng.uniform(0, 0.05), kill, [remote, next(victims)]
      )
      timer.start()
    try:
      while len(infos) < STEPS:
        infos.append(
          float(remote.step(driver_test.batch(len(infos) % 5), driver_test.KEY))
        )
        notices += remote.notices()
        if len(infos) % 2 == 0:
          states.append(float(saved.state_of(remote)))
    except ProcessDiedError:
      died += 1
      infos = infos[: 2 * (len(states) - 1)]
      remote.start(driver_test.first(states[-1]), len(infos))
    finally:
      if timer is not None:
        timer.cancel()
        timer.join()
  return infos, states[-1], died, notices


@pytest.mark.parametrize('deaths', claims.some([5, 30], keep=[5]))
def test_deaths_at_any_moment_change_nothing(pair, deaths):
  remote, local_ = pair
  in_memory.start(local_, jnp.zeros(()))
  want = [
    float(local_.step(driver_test.batch(i % 5), driver_test.KEY))
    for i in range(STEPS)
  ]
  final, rng = float(in_memory.state(local_)), np.random.default_rng(0)
  died, notices, victims = 0, 0, itertools.cycle('ab')
  while died + notices < deaths:
    infos, state, more, lines = survive(remote, rng, victims, 3)
    # The state after the last step: a place may be killed right after it.
    assert infos == want and state == final
    died, notices = died + more, notices + len(lines)
    assert all("of place 'b' has died" in line for line in lines)
  assert min(died, notices) > deaths // 6  # `a` holds the state, `b` nothing.


@pytest.mark.parametrize(
  'staleness, deaths, dtype',
  claims.some(
    [
      (0, 4, 'float32'),
      (1, 4, 'float32'),
      (0, 4, 'bfloat16'),
      (1, 4, 'bfloat16'),
      (1, 1, 'bfloat16'),
    ],
    keep=[(1, 1, 'bfloat16')],
  ),
)
def test_a_place_that_only_holds_copies_is_replaced_within_a_step(
  runtimes, staleness, deaths, dtype
):
  """At any moment: no state is loaded again, and all bits are the same.

  In bfloat16 the copies are of rounded parameters. The actor writes those that
  are carried to the checkpoint, in float32.
  """
  sketch = driver_test.TWO | {'pieces': 2}
  remote, local_ = runtimes(
    sketch, functools.partial(driver_test.flows, staleness, dtype)
  )
  make = functools.partial(driver_test.grpo, staleness, dtype)
  want = driver_test.run(local_, make, steps=8)
  got = driver_test.run(remote, make, steps=8)  # It compiles, too.
  tiny.assert_same_bits(got, want)
  driver_test.assert_told(remote)
  if (staleness, dtype) == (1, 'bfloat16'):
    driver_test.assert_rounded(remote, local_, steps=8)
  local_.close()
  rng, notices = np.random.default_rng(staleness), []
  for _ in range(deaths):
    timer = threading.Timer(rng.uniform(0, 0.4), kill, [remote, 'actor'])
    got = driver_test.run(
      remote,
      make,
      steps=8,
      after_load=timer.start,
      # A place that dies while it writes its state ends the run.
      before_read=timer.join,
    )
    tiny.assert_same_bits(got, want)
    notices += remote.notices()
  assert notices
  for line in notices:
    assert re.search("'actor' has died in step .* and was replaced", line)
