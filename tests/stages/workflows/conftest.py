import pytest

import shared_stages


@pytest.fixture(scope='module', autouse=True)
def equal_stages_share_programs():
  """Tests here make many workflows that differ in a setting or two."""
  with shared_stages.sharing():
    yield
