"""Compares a run in processes with the same run in threads."""
