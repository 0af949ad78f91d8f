import threading
import time

import pytest

from rlinf_jax.runtime import base, mailbox

ONE = base.Channel('step', (), 3, 'actor', 'learner')
TWO = ONE._replace(value=4)


def test_a_channel_is_a_fifo_queue():
  post = mailbox.Mailbox()
  for i in range(5):
    post.put(ONE, i)
    post.put(TWO, -i)
  assert [post.get(ONE) for _ in range(5)] == list(range(5))
  assert [post.get(TWO) for _ in range(5)] == [0, -1, -2, -3, -4]


def test_a_failure_wakes_present_and_later_receivers():
  post, errors = mailbox.Mailbox(), []

  def wait():
    with pytest.raises(ValueError, match='first') as error:
      post.get(ONE)
    errors.append(error.value)

  thread = threading.Thread(target=wait)
  thread.start()
  time.sleep(0.02)
  post.fail(ValueError('the first'))
  post.fail(ValueError('the second'))
  thread.join()
  for channel in (TWO, TWO, ONE):  # A receiver may ask again.
    with pytest.raises(ValueError, match='first'):
      post.get(channel, 1.0)
  assert len(errors) == 1 and post.failure is errors[0]
  post.clear()
  post.put(ONE, 'new')
  assert post.get(ONE) == 'new' and post.failure is None


def test_a_receiver_waits_no_longer_than_its_timeout():
  with pytest.raises(
    base.ReceiveTimeoutError, match=r"'learner' waited 0.01 s"
  ):
    mailbox.Mailbox().get(ONE, 0.01)
