"""Demonstrations of robots from data sets in the RLDS format."""
