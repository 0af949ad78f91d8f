"""Reinforcement learning as pure functions over batches."""

from stages.base import (
  Completions,
  Demonstration,
  Evaluation,
  Example,
  Experience,
  Policy,
  Problem,
  Prompt,
  Source,
  TrainState,
  Verdict,
  Version,
  Workflow,
)
from stages.core import Deferred, EngineCost, keys, Stage, stage
from stages.envs.env import Env, TimeStep
from stages.repeat import Repeat

__all__ = [
  'Demonstration',
  'EngineCost',
  'Completions',
  'Evaluation',
  'Example',
  'Experience',
  'Deferred',
  'TimeStep',
  'Policy',
  'Problem',
  'Prompt',
  'Repeat',
  'Source',
  'Stage',
  'TrainState',
  'Verdict',
  'Version',
  'Workflow',
  'Env',
  'keys',
  'stage',
]
