"""Algorithms: each a function of its parts that returns a `Workflow`."""

from stages.workflows.behavior_cloning import behavior_cloning
from stages.workflows.dapo import dapo
from stages.workflows.distillation import distillation
from stages.workflows.dpo import dpo
from stages.workflows.embodied_grpo import embodied_grpo
from stages.workflows.embodied_ppo import embodied_ppo
from stages.workflows.expert_iteration import expert_iteration
from stages.workflows.grpo import grpo
from stages.workflows.ppo import ppo
from stages.workflows.reinforce import reinforce
from stages.workflows.role_grpo import role_grpo
from stages.workflows.sac import sac
from stages.workflows.sft import sft

__all__ = [
  'behavior_cloning',
  'dapo',
  'distillation',
  'dpo',
  'embodied_grpo',
  'embodied_ppo',
  'expert_iteration',
  'grpo',
  'ppo',
  'reinforce',
  'role_grpo',
  'sac',
  'sft',
]
