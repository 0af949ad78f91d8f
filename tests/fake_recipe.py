"""A small library and a recipe for it, for tests of what recipes may say."""

import contextlib
import sys
import textwrap

from rlinf_jax import config

LIBRARY = {
  'optim.py': """
    def adam(learning_rate=1e-3):
      return 'adam', learning_rate

    def adamw(learning_rate=1e-3, decay=0.0):
      return 'adamw', learning_rate, decay
    """,
  'flows.py': """
    def grpo(optimizer, *, group, high=0.2, loss=None):
      return 'grpo', optimizer, group, high, loss

    def sft(optimizer=None, examples=8):
      return 'sft', optimizer, examples

    def token_mean(scale=1.0):
      return scale
    """,
  'loop.py': """
    def train(workflow, *, workdir, steps, seed=0, before=None, resume=False):
      if before is not None and not resume:
        before(workdir=workdir + '/warm_start')
      return workflow, workdir, steps, seed
    """,
  'clumsy.py': """
    def area(width, height):
      return width * height

    def train():
      return area(1)
    """,
  'broken.py': 'undefined_name',
  'unfinished.py': 'def f(',
}

BASE = """
  from __gin__ import dynamic_registration
  from recipe_library import flows
  from recipe_library import loop
  from recipe_library import optim

  STEPS = 5
  OPTIMIZER = @optim.adamw()
  optim.adamw.learning_rate = 0.1
  flows.grpo.optimizer = %OPTIMIZER
  flows.grpo.group = 4
  loop.train.workflow = @flows.grpo()
  loop.train.steps = %STEPS
  """


@contextlib.contextmanager
def library(folder):
  """Makes `recipe_library` importable."""
  package = folder / 'recipe_library'
  package.mkdir()
  for name, text in LIBRARY.items():
    (package / name).write_text(textwrap.dedent(text))
  sys.path.insert(0, str(folder))
  yield
  sys.path.remove(str(folder))


def write(name, text):
  with open(name, 'w') as file:
    file.write(textwrap.dedent(text))


def parse(*bindings, files=('base.gin',)):
  config.parse(files, bindings, 'runs/x')


def run(**given):
  from recipe_library import loop

  return config.call(loop.train, workdir='runs/x', **given)
