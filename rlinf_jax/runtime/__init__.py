"""Interprets programs with arrays."""
