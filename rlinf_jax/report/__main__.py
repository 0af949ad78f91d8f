"""Runs `python -m rlinf_jax.report`."""

from rlinf_jax import startup
from rlinf_jax.report import report

if __name__ == '__main__':
  with startup.ended():
    report.main()
