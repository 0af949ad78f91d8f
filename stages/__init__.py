"""Reinforcement learning as pure functions over batches."""

from stages.base import (
  Camera,
  Demonstration,
  Draft,
  Evaluation,
  Example,
  Experience,
  Outcome,
  Policy,
  Problem,
  Prompt,
  Source,
  TrainState,
  Verdict,
  Version,
  Workflow,
  World,
)
from stages.core import keys, Later, Stage, stage
from stages.repeat import Repeat

__all__ = [
  'Camera',
  'Demonstration',
  'Draft',
  'Evaluation',
  'Example',
  'Experience',
  'Later',
  'Outcome',
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
  'World',
  'keys',
  'stage',
]
