"""Automatic planning: profiling stages, choosing a plan, monitoring it."""
