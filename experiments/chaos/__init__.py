"""Faults at random moments of runs."""
