"""Runs the program on standard input; all that a sandbox sees of this package.

It imports the standard library alone, because a sandbox has little else.
"""

import ast
import linecache
import resource
import sys
import traceback

NAME = '<program>'
MAX_FRAMES = 5  # Of a traceback, the innermost.
# Limits that a program cannot raise again. It may write to no file.
MOST = {
  resource.RLIMIT_AS: 2**31,
  resource.RLIMIT_CORE: 0,
  resource.RLIMIT_CPU: 60,  # Seconds.
  resource.RLIMIT_FSIZE: 0,
  resource.RLIMIT_NOFILE: 32,
}


def main():
  sys.path[:] = [*sys.argv[1:], *sys.path[1:]]
  del sys.argv[1:]
  print(flush=True)  # The other side then sends the program.
  source = sys.stdin.buffer.read().decode()
  for limit, most in MOST.items():
    now, _ = resource.getrlimit(limit)
    least = most if now == resource.RLIM_INFINITY else min(now, most)
    resource.setrlimit(limit, (least, least))
  lines = [f'{line}\n' for line in source.splitlines()]
  linecache.cache[NAME] = (len(source), None, lines, NAME)
  try:
    run(source)
  except Exception as error:  # noqa: BLE001 (It is printed, as Python does.)
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename != NAME:
      frames = frames.tb_next  # Those of this file.
    sys.stdout.flush()
    traceback.print_exception(error.with_traceback(frames), limit=-MAX_FRAMES)
    sys.exit(1)


def run(source: str):
  """Runs a program; prints the value of its last line, if it has one."""
  tree = ast.parse(source, NAME)
  last = []
  if tree.body and isinstance(tree.body[-1], ast.Expr):
    last = [tree.body.pop()]
  space = {'__name__': '__main__', 'exit': sys.exit, 'quit': sys.exit}
  exec(compile(tree, NAME, 'exec'), space)
  exec(compile(ast.Interactive(last), NAME, 'single'), space)


if __name__ == '__main__':
  main()
