"""Measurements, each with the command that gives it."""
