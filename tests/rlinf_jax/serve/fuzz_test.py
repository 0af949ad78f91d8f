"""Noise at the endpoint's port serves nothing, and ends nothing."""

import re
import urllib.parse

import pytest

import claims
import fuzz
from tests.rlinf_jax.serve import endpoint_test

folder, served = endpoint_test.folder, endpoint_test.served
running = endpoint_test.running


@pytest.mark.slow
@pytest.mark.parametrize('n', claims.some((500, 10_000), keep=(500,)))
def test_random_and_mutated_messages_get_no_answer_but_an_error(n, running):
  where = urllib.parse.urlsplit(running.url)
  seen = set()
  for answer in fuzz.answers([(where.hostname, where.port)], n):
    statuses = re.findall(rb'HTTP/1\.1 (\d{3})', answer)
    seen.update(statuses)
    assert all(400 <= int(x) < 500 for x in statuses), answer[:500]
  assert {b'400', b'401'} <= seen
  assert endpoint_test.chat(running, max_tokens=1).choices
