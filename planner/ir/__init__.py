"""Intermediate representation: flows, plans and instructions, as plain data."""
