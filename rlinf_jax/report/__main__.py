"""Runs `python -m rlinf_jax.report`."""

from rlinf_jax.report import report

if __name__ == '__main__':
  report.main()
