"""Explanations of a plan: timeline, bottleneck, slack and sensitivity."""
