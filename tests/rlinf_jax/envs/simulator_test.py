"""Instructions as bytes, in observations of simulators."""

import pytest

from rlinf_jax.envs import simulator


def test_an_instruction_is_bytes_of_which_none_are_lost():
  text = 'öffne ' + 'x' * 121  # 128 bytes.
  assert bytes(simulator.instruction_bytes(text)).decode() == text
  assert bytes(simulator.instruction_bytes('go')) == b'go'.ljust(128, b'\0')
  with pytest.raises(simulator.UnavailableError, match='129 bytes.*shorter'):
    simulator.instruction_bytes(f'{text}x')
