"""Which instances of a claim `make test` runs; `make claims` runs them all."""

import pytest


def some(cases, keep):
  """Values for `parametrize`: those not kept run with `--claims` alone.

  Args:
    cases: all values, tuples where a test has several arguments.
    keep: those that every run of the tests has; they should differ in all that
      the family varies.
  """
  missing = set(keep) - set(cases)
  if missing:
    raise ValueError(f'{sorted(missing)} to keep are not among the cases.')
  return [case if case in keep else _for_claims(case) for case in cases]


def _for_claims(case):
  values = case if isinstance(case, tuple) else (case,)
  return pytest.param(*values, marks=pytest.mark.claims)
