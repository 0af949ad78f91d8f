"""Runs the programs of a plan on arrays."""
