"""The machine and the front door: the train loop, configuration, disks."""

from rlinf_jax import startup

# Here, because `python -m` imports the package before the program's modules.
startup.begin()
