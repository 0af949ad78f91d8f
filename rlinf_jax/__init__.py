"""The machine and the front door: the train loop, configuration, disks."""

from rlinf_jax import startup

startup.begin()
