"""Measures the gain of pipelining and the overhead of interpreting."""
