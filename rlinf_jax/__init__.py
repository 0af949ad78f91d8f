"""Runs workflows: recipes in gin, plans, runtimes, simulators, run folders."""

from rlinf_jax import startup

# Here, because `python -m` imports the package before the program's modules.
startup.begin()
