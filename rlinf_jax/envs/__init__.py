"""Simulators as environments, in worker processes."""
