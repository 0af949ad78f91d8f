"""Rollouts of a policy: to train on, to evaluate, to show as videos."""
