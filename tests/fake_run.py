"""Run folders as training leaves them, made by code, for tests of readers."""

import json

import numpy as np

CONFIG = """\
from __gin__ import dynamic_registration
from rlinf_jax import train
from stages.workflows import grpo

STEPS = 180
train.train.steps = %STEPS
train.train.workflow = @grpo.grpo()
grpo.grpo.group = 8
grpo.grpo.high = 0.28  # <not> markup & not $money
"""


def write_lines(path, records):
  path.write_text(''.join(json.dumps(record) + '\n' for record in records))


def worked(a, b, luck, accuracy):
  """A scratchpad of a + b, and whether it comes out right."""
  right = luck < accuracy
  total = a + b + (0 if right else 10)
  units = (a % 10 + b % 10) % 10
  return f'{a % 10}+{b % 10} {units}; {a}+{b}={total}<eos>', float(right)


def make_run(folder, *, steps=180, every=20, finished=True, warm_start=True):
  """A run folder as a GRPO run on sums leaves it, in miniature."""
  folder.mkdir()
  rng = np.random.default_rng(0)
  metrics, timeline, samples, now = [], [], [], 0.0
  accuracy = lambda step: 0.31 + 0.645 / (1 + np.exp(-(step - 70) / 18))

  def stage(step, name, seconds):
    nonlocal now
    record = {'step': step, 'place': 'all', 'what': 'run', 'stage': name}
    timeline.append({**record, 'start': now, 'end': now + seconds})
    now += seconds
    return seconds

  def evaluate(step):
    right = accuracy(step) - 0.013
    metrics.append(
      {
        'step': step,
        'eval/accuracy': right,
        'eval/response_length_mean': 23.0 - 2 * right,
        'time/evaluate': stage(step, 'evaluate', 1.1 + 0.1 * rng.random()),
      }
    )
    for i in range(10):
      a, b = 347 + 91 * i, 586 + 37 * i
      text, reward = worked(a, b, (i * 0.37) % 1, right)
      samples.append(
        {
          'step': step,
          'split': 'eval',
          'prompt': f'{a}+{b}=',
          'completion': text,
          'reward': reward,
        }
      )

  if every:
    evaluate(0)
  for step in range(1, steps + 1):
    slow = 12.0 if step == 1 else 1.0
    begin = now
    times = {
      'generate': stage(step, 'generate', 0.9 * slow + 0.1 * rng.random()),
      'reward': stage(step, 'reward', 0.004),
      'gradient': stage(step, 'gradient', 0.55 * slow + 0.05 * rng.random()),
      'apply': stage(step, 'apply', 0.03 * slow),
    }
    now += 0.02
    right = min(1.0, accuracy(step) + 0.04 * rng.standard_normal())
    length = 25 - 2 * right + 0.3 * rng.standard_normal()
    metrics.append(
      {
        'step': step,
        'train/policy_loss': 0.02 * rng.standard_normal(),
        'train/grad_norm': 0.4 + 0.2 * rng.random() + 4 * (step == 33),
        'train/entropy': 0.35 * np.exp(-step / 60) + 0.02 * rng.random(),
        'train/clip_fraction': 0.02 * rng.random(),
        'train/kl_behaviour': 0.002 * rng.random(),
        'train/lr': 3e-4 * min(1, step / 10),
        'rollout/reward_mean': right,
        'rollout/accuracy': right,
        'rollout/response_length_mean': length,
        'rollout/response_length_max': round(31 + 3 * rng.random()),
        'rollout/truncated_fraction': 0.02 * rng.random() * (step < 60),
        **{f'time/{name}': value for name, value in times.items()},
        'time/step': now - begin,
        'throughput/tokens_per_second': 256 * length / (now - begin),
      }
    )
    if every and step % every == 0:
      evaluate(step)
  write_lines(folder / 'metrics.jsonl', metrics)
  write_lines(folder / 'timeline.jsonl', timeline)
  write_lines(folder / 'samples.jsonl', samples)
  (folder / 'config.gin').write_text(CONFIG)
  (folder / 'plan.json').write_text('{"places": {"all": {"devices": [0]}}}')
  if warm_start:
    make_warm_up(folder / 'warm_start')
  if finished:
    result = {'steps': steps, 'seconds': now + 4.0, 'metrics': metrics[-1]}
    (folder / 'result.json').write_text(json.dumps(result))
  return folder


def make_warm_up(folder, steps=300, evaluated=True):
  folder.mkdir()
  rng = np.random.default_rng(1)
  metrics = []
  for step in range(steps + 1):
    if evaluated and step % 50 == 0:
      right = 0.31 / (1 + np.exp(-(step - 200) / 25))
      metrics.append(
        {'step': step, 'eval/accuracy': right, 'time/evaluate': 1.0}
      )
    loss = 2.5 * np.exp(-step / 80) + 0.3 + 0.05 * rng.random()
    if step:
      metrics.append(
        {
          'step': step,
          'train/loss': loss,
          'time/gradient': 0.2,
          'time/step': 0.22,
        }
      )
  write_lines(folder / 'metrics.jsonl', metrics)
  result = {'steps': steps, 'seconds': 75.0, 'metrics': {}}
  (folder / 'result.json').write_text(json.dumps(result))
  return folder
