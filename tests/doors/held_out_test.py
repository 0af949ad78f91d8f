"""Numbers of held-out episodes are checked when a recipe is read."""

import pathlib

import pytest

from rlinf_jax.config import config

ROOT = pathlib.Path(__file__).parents[2]
SUMS = 'gin_configs/grpo_arithmetic.gin'
PUSH = 'gin_configs/ppo_push.gin'
PLATE = 'gin_configs/ppo_openvla_maniskill.gin'
SEEDS = 'seed_source.seeds.held_out'


def test_held_out_episodes_are_counted_before_a_simulator_starts(monkeypatch):
  monkeypatch.chdir(ROOT)
  with pytest.raises(ValueError) as error:
    config.parse([PLATE], ['MODEL = "/model"', f'{SEEDS} = 100'], '/runs/x')
  assert str(error.value).startswith(f"--gin_bindings '{SEEDS} = 100', gin_con")
  assert str(error.value).endswith(
    ': `held_out` of `stages.envs.seed_source.seeds` is 100, and must be a '
    'multiple of its `held_out_batch`, 128: change one of them.'
  )
  # One of the two may be left out, or be set where it is called.
  with pytest.raises(ValueError, match='is 130, .* `held_out_batch`, 100: ch'):
    config.parse([PUSH], [f'{SEEDS} = 130'], '/runs/x')
  scoped = [f'{SEEDS} = 130', f'a/{SEEDS}_batch = 13']
  config.parse([PUSH], scoped, '/runs/x')
  with pytest.raises(ValueError, match='is 130, .* `held_out_batch`, 12: ch'):
    config.parse([PUSH], [*scoped, f'a/{SEEDS}_batch = 12'], '/runs/x')
  # Two calls that share both numbers are one fault.
  sums = 'arithmetic.problems'
  shared = [f'{scope}/{sums}.batch_size = 4' for scope in 'ab']
  with pytest.raises(ValueError, match='^(?!.*is 130.*is 130).*is 130, and'):
    config.parse([SUMS], [*shared, f'{sums}.held_out = 130'], '/runs/x')
