"""Eight CPU devices, no network, and names that tell the truth.

While tests run, every array in `stages` whose name ends in dimension letters is
checked when its function returns: it must have that rank, and within the
function each letter has one size. `x_B1D` has three dimensions, the second of
size one; an integer named by a letter (`T = x.shape[1]`) must agree too, and so
must the attributes of `self`, such as a flax module's parameters. There is no
way to opt out.

The check is compiled into `stages` as it is imported. A profiler would see the
same, but it slows down all of Python (tracing a transformer takes 1.8 times as
long), sees one thread only and cannot tell returning from raising.
"""

import ast
import importlib.machinery
import os
import pathlib
import re
import secrets
import sys
import zlib

# In the environment, so that the processes which tests start see them too.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
# Nodes of Ray that tests start let in who has it.
os.environ.setdefault('RAY_AUTH_MODE', 'token')
os.environ.setdefault('RAY_AUTH_TOKEN', secrets.token_hex(32))

# Compiled programs are kept for the next run, bit for bit the same. JAX's key
# knows neither the instruction set nor the cores, so the folder's name does.
CPUINFO = pathlib.Path('/proc/cpuinfo')
if CPUINFO.exists():
  features = re.findall('^(?:flags|Features).*', CPUINFO.read_text(), re.M)[:1]
  machine = f'{features} {len(os.sched_getaffinity(0))}'
  cache = pathlib.Path(__file__).parents[1] / '.cache'
  os.environ.setdefault(
    'JAX_COMPILATION_CACHE_DIR',
    f'{cache}/jax/{zlib.crc32(machine.encode()):08x}',
  )
  os.environ.setdefault('RLINF_JAX_CACHE', f'{cache}/measured')
  os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.1')

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')


@pytest.fixture
def in_float64():
  """For all threads, as the runtime compiles on its own."""
  jax.config.update('jax_enable_x64', True)
  yield
  jax.config.update('jax_enable_x64', False)


@pytest.fixture
def quickly_compiled():
  """Programs that XLA hardly optimises, where most of a test is to compile."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)


SUFFIX = re.compile(r'_([A-Z0-9]*[A-Z][A-Z0-9]*)$')


def check(returned):
  """Checks the names of the calling function, and returns what it returns."""
  frame = sys._getframe(1)
  names = dict(frame.f_locals)
  if 'self' in names:
    attributes = getattr(names['self'], '__dict__', {})
    names |= {f'self.{name}': value for name, value in attributes.items()}
  sizes = {
    name: (value, name)
    for name, value in names.items()
    if re.fullmatch('[A-Z]', name) and isinstance(value, int)
  }
  for name, value in names.items():
    match = SUFFIX.search(name)
    # To ask a flax module for an attribute may set it up: ask only of arrays.
    shape = getattr(value, 'shape', None) if match else None
    if not isinstance(shape, tuple):
      continue
    where = f'{frame.f_code.co_qualname}: {name} has shape {shape}'
    if len(match[1]) != len(shape):
      raise AssertionError(f'{where}, of another rank than its name.')
    for letter, size in zip(match[1], shape, strict=True):
      want, source = sizes.setdefault(letter, (size, name))
      if letter.isdigit():
        want, source = int(letter), 'its name'
      if want != size:
        raise AssertionError(f'{where}, but {letter} is {want} in {source}.')
  return returned


class Returns(ast.NodeTransformer):
  """Sends what functions return through `check`."""

  def visit_Return(self, node):
    self.generic_visit(node)
    node.value = self.checked(node.value or ast.Constant(None))
    return node

  def visit_Lambda(self, node):
    self.generic_visit(node)
    node.body = self.checked(node.body)
    return node

  def visit_FunctionDef(self, node):
    self.generic_visit(node)
    end = ast.Expr(self.checked(ast.Constant(None)))
    node.body.append(ast.copy_location(end, node.body[-1]))
    return node

  def checked(self, value):
    return ast.Call(ast.Name('__check__', ast.Load()), [value], [])


class Loader(importlib.machinery.SourceFileLoader):
  """Loads a module with `check` in it."""

  def source_to_code(self, data, path, **kwargs):
    tree = ast.fix_missing_locations(Returns().visit(ast.parse(data, path)))
    return super().source_to_code(tree, path, **kwargs)

  def path_stats(self, path):
    raise OSError('Checked code stays out of the bytecode cache.')

  def exec_module(self, module):
    module.__check__ = check
    super().exec_module(module)


class Finder:
  """Finds the modules of `stages`."""

  @staticmethod
  def find_spec(name, path=None, target=None):
    if name.partition('.')[0] != 'stages':
      return None
    spec = importlib.machinery.PathFinder.find_spec(name, path, target)
    if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
      spec.loader = Loader(spec.loader.name, spec.loader.path)
    return spec


sys.meta_path.insert(0, Finder)
