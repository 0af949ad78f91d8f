"""Simulators in worker processes, stepped together and restored on failure."""
