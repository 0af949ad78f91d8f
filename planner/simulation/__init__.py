"""Discrete-event simulation of programs with modelled costs."""
