"""Recipes learn: short seeds of what `experiments` runs whole."""

import json

import pytest

import front_door


def judged(name, folder, recipe, *bindings):
  """The values of a metric in a run's evaluations, in order."""
  done = front_door.run(
    f'--gin_file={recipe}',
    f'--workdir={folder}',
    *(f'--gin_bindings={binding}' for binding in bindings),
  )
  assert done.returncode == 0, done.stderr
  lines = (folder / 'metrics.jsonl').read_text().splitlines()
  return [x[name] for x in map(json.loads, lines) if name in x]


@pytest.mark.claims
@pytest.mark.slow
def test_grpo_learns_sums_that_imitation_left_wrong(tmp_path):
  accuracy = judged(
    'eval/accuracy',
    tmp_path / 'run',
    'gin_configs/grpo_arithmetic.gin',
    'STEPS = 40',
    'train.train.evaluate_every = 40',
  )
  # 512 problems: two standard errors are 4 points.
  assert 0.35 <= accuracy[0] <= 0.7
  assert accuracy[-1] >= accuracy[0] + 0.15


@pytest.mark.claims
@pytest.mark.slow
def test_ppo_keeps_what_a_policy_can_while_its_critic_learns(tmp_path):
  start = tmp_path / 'start'
  judged('eval/return', start, 'gin_configs/ppo_push.gin', 'STEPS = 20')

  def go_on(name, *bindings):
    return judged(
      'eval/success_once',
      tmp_path / name,
      'experiments/critic/push.gin',
      f"CHECKPOINT = '{start}/model'",
      'train.train.steps = 20',
      *bindings,
    )

  warm = go_on('warm')
  cold = go_on(
    'cold',
    'critic/optimizers.adamw.learning_rate = 1e-4',
    'optimizers.actor_critic.critic_warmup_steps = 0',
  )
  # 100 seeds: two standard errors are 10 points.
  assert warm[0] == cold[0] >= 0.4
  assert warm[1] == warm[0]  # Five steps are the critic's alone.
  assert warm[-1] >= warm[0] - 0.1
  assert cold[-1] <= cold[0] / 2
