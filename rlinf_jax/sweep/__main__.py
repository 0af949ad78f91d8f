"""Runs `python -m rlinf_jax.sweep`, whose help is that of `sweep`."""

from absl import app, flags

from rlinf_jax import gin_flags, startup
from rlinf_jax.sweep import sweep

flags.adopt_module_key_flags(sweep)  # --help lists those of this module.

if __name__ == '__main__':
  __doc__ = sweep.__doc__
  with startup.ended():
    app.run(sweep.main, flags_parser=gin_flags.parse)
