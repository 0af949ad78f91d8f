"""Failures from which a run recovered, in sentences.

They are skipped updates, lost episodes, failed rewards and the notices that the
console printed.

The console prints each when it happens. The summary of a run and its report
count them, so that a run which ends well does not hide them.
"""

import collections
from collections.abc import Iterable, Mapping
import math
import os
import pathlib
from typing import Any

from rlinf_jax.run_files import run_folder

FILE = 'notices.jsonl'  # Lines that the console printed, by step.
ENVIRONMENTS = ('env/failed', 'eval/failed')
CONVERSATIONS = ('rollout/env_failed', 'eval/env_failed')
REWARDS = ('rollout/reward/failed', 'eval/reward/failed')


def read(folder: str | os.PathLike) -> list[str]:
  """The failures of a run, each in a sentence, from the files in its folder."""
  metrics, notices = (
    run_folder.records(pathlib.Path(folder), name)
    for name in ('metrics.jsonl', FILE)
  )
  return [*_of_metrics(metrics), *_of_notices(notices)]


def skipped_share(values: Mapping[str, float | str]) -> float:
  """The largest share of skipped updates among the networks of a step."""
  of_each = (
    _finite(x)
    for name, x in values.items()
    if name.startswith('train/') and name.endswith('skipped')
  )
  return max(of_each, default=0.0)


def _of_metrics(lines: Iterable[Mapping[str, Any]]) -> Iterable[str]:
  skipped = episodes = conversations = rewards = 0
  for x in lines:
    skipped += skipped_share(x) > 0
    episodes += sum(_finite(x.get(name, 0)) for name in ENVIRONMENTS)
    conversations += sum(_finite(x.get(name, 0)) for name in CONVERSATIONS)
    rewards += any(_finite(x.get(name, 0)) > 0 for name in REWARDS)
  if skipped:
    steps = _number(skipped, 'step', 'steps')
    yield f'In {steps} an update was skipped, as its gradient was not finite.'
  if episodes > 0:
    lost = _number(episodes, 'episode was', 'episodes were')
    yield f'{lost} lost, as a simulator failed.'
  if conversations > 0:
    lost = _number(conversations, 'conversation was', 'conversations were')
    yield f'{lost} lost, as an environment or an agent failed.'
  if rewards:
    steps = _number(rewards, 'step or evaluation', 'steps or evaluations')
    yield f'A reward failed in {steps}.'


def _finite(value: float | str) -> float:
  """A logged number; 0 for 'NaN', the mean of nothing."""
  number = float(value)
  return number if math.isfinite(number) else 0.0


def _number(count: float, one: str, several: str) -> str:
  return f'{count:,.0f} {one if count == 1 else several}'


def _of_notices(lines: Iterable[Mapping[str, Any]]) -> Iterable[str]:
  newest = collections.deque(enumerate(lines, 1), maxlen=1)
  for count, last in newest:
    number = 'One notice' if count == 1 else f'{count:,} notices'
    yield (
      f'{number} of the run: see {FILE}. The last, at step {last["step"]}: '
      f'{last["text"]}'
    )
