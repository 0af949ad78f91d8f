"""Conversations of policies with text environments, in one or several roles."""

from stages.language.conversation.episode import (
  converse,
  Episode,
  episode_return,
  finish,
  TextEnvs,
)

__all__ = ['Episode', 'TextEnvs', 'converse', 'episode_return', 'finish']
