"""Algorithms: each a function of its parts that returns a `Workflow`."""

from stages.workflows.dapo import dapo
from stages.workflows.grpo import grpo
from stages.workflows.ppo import ppo
from stages.workflows.sac import sac
from stages.workflows.sft import sft

__all__ = ['dapo', 'grpo', 'ppo', 'sac', 'sft']
