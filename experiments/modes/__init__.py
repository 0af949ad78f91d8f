"""The published choices of execution mode, replayed on paper."""
