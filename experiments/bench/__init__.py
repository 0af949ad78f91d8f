"""Benchmark of one training step."""
