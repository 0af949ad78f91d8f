"""Measures this machine and the stages of a flow on it, and remembers."""
