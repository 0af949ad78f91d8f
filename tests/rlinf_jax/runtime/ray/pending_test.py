"""Calls that are pending: which processes have finished them."""

import pytest

from rlinf_jax.runtime.ray import pending


@pytest.mark.parametrize(
  'answered, acknowledged, lacks',
  [(False, False, True), (True, False, True), (True, True, False)],
)
def test_a_process_lacks_a_call_until_what_it_sent_has_arrived(
  monkeypatch, answered, acknowledged, lacks
):
  """One that dies with a value on its way has it made and sent again."""
  call = pending.PendingCall('step', 1, None, 0, 0, {'reference': 'b'})
  ready = answered
  if answered:  # Then the driver awaits the news of the arrival.
    call.sent['reference'] = {}
    ready = acknowledged
  monkeypatch.setattr(pending, 'is_answered', lambda reference: ready)
  assert call.lacks('b') == lacks
  assert not call.lacks('a')
  if (
    not answered
  ):  # The driver has not read the answer yet, and awaits no arrival.
    monkeypatch.setattr(pending, 'is_answered', lambda reference: True)
    assert call.lacks('b')
