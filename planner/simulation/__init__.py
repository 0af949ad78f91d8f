"""Discrete-event simulation of programs with modeled costs."""
