"""Environments in pure JAX, rollouts in any environment, and their metrics."""
