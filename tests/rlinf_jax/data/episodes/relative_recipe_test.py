"""Relative actions of fine-tuning, which a recipe takes from its model."""

import pytest

from rlinf_jax.config import config
from rlinf_jax.data.episodes import source, statistics
from stages.vla import normalization


@pytest.mark.parametrize('given', [None, (False, True)])
def test_fine_tuning_keeps_the_relative_actions_of_its_model(given, tmp_path):
  actions = {'mean': [0.0] * 2, 'std': [1.0] * 2, 'relative': [True, False]}
  normalization.write(tmp_path, 'data', {'actions': actions})
  bindings = [f'MODEL = {str(tmp_path)!r}', "DATA = 'none'"]
  if given:
    bindings.append(f'RELATIVE_ACTIONS = {given}')
  config.parse(['gin_configs/sft_pi0.gin'], bindings, str(tmp_path))
  for reader in source.source, statistics.openpi:
    got = config.binding(reader, 'relative_actions')
    assert got == (given or (True, False))
