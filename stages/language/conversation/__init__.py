"""Conversations of policies with text environments, in one or several roles."""

from stages.language.conversation.episode import (
  Conversations,
  converse,
  Episode,
  episode_return,
  finish,
  TextEnvs,
)
from stages.language.conversation.partial import partial_conversations

__all__ = [
  'Conversations',
  'Episode',
  'TextEnvs',
  'converse',
  'episode_return',
  'finish',
  'partial_conversations',
]
