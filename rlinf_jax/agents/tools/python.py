"""A Python interpreter as a tool, in a sandbox."""

from rlinf_jax.isolation import sandbox


def python(code: str) -> str:
  """Runs a Python program and returns what it prints.

  NumPy and SymPy may be imported. There are no files and no network, and
  nothing is kept for the next call.

  Args:
    code: The program. The value of its last line is printed, too.
  """
  return sandbox.run(code)


python.check = sandbox.check
