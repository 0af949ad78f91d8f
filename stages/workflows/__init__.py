"""Algorithms: each a function of its parts that returns a `Workflow`."""

from stages.workflows.grpo import grpo
from stages.workflows.sft import sft

__all__ = ['grpo', 'sft']
