"""Rollouts that continue over several training steps.

`completions` carries unfinished completions, and
`stages.language.conversation` conversations. Both are `carried` alike.
"""

from stages.language.partial_rollout.completions import partial_rollouts

__all__ = ['partial_rollouts']
