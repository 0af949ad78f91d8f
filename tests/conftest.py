"""Eight CPU devices, no network, and arrays of the dimensions that they say."""

import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import signal
import sys
import threading
import time
import types
import zlib

# Tracing makes millions of objects that live long. By default Python searches
# for cycles after every 700 of them, for a fourteenth of the tests' time.
gc.set_threshold(50_000, 20, 4)

# In the environment, so that the processes which tests start see them too.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
AS_FOUND = {
  'JAX_DISABLE_MOST_OPTIMIZATIONS': '0',
  'XLA_FLAGS': os.environ.get('XLA_FLAGS', ''),
}
# Compiling is most of what tests do, and costs a fifth so: 6 CPU-seconds rather
# than 31 for two steps of SAC. `fully_optimized` opts out of the first.
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
XLA_FLAGS = ['--xla_cpu_parallel_codegen_split_count=1']
# Later versions have no other emitters, and refuse the flag.
HAS_OLD_EMITTERS = importlib.metadata.version('jaxlib').startswith('0.10.')
if HAS_OLD_EMITTERS:
  XLA_FLAGS.append('--xla_cpu_use_fusion_emitters=false')
XLA_FLAGS.append(os.environ.get('XLA_FLAGS', ''))
os.environ['XLA_FLAGS'] = ' '.join(XLA_FLAGS).strip()
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
# Ray gives its processes a thirtieth of the share of a processor that others
# have (nice 15): beside two processes of tests they would hardly go on.
os.environ.setdefault('RAY_worker_niceness', '0')

# A shell starts processes in the background, as two of the three that share the
# tests, with SIGINT ignored, and so would be all that they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

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
  os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')

import jax  # noqa: E402
from jax._src import compilation_cache, compiler  # noqa: E402
import psutil  # noqa: E402
import pytest  # noqa: E402

import dimension_letters  # noqa: E402
import ir_contexts  # noqa: E402

dimension_letters.install()  # Before anything imports `stages`.
ir_contexts.share()

# Most programs are compiled once: to write them fast is worth more than space.
compilation_cache.zlib = types.SimpleNamespace(
  compress=functools.partial(zlib.compress, level=1), decompress=zlib.decompress
)
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
TRIM = getattr(ctypes.CDLL(None), 'malloc_trim', None)


@pytest.fixture
def in_float64():
  """For all threads, as the runtime compiles on its own."""
  jax.config.update('jax_enable_x64', True)
  yield
  jax.config.update('jax_enable_x64', False)


@pytest.fixture(autouse=True)
def no_recipe():
  """Forgets the recipe that a test has read.

  A run that a later test of this process starts from Python would refuse it,
  because it reads none of those bindings.
  """
  yield
  if 'gin' in sys.modules:
    sys.modules['gin'].clear_config()


# Resident bytes of a process from which on compiled programs are freed.
MEMORY = 2 * 2**30


@pytest.fixture(autouse=True, scope='module')
def few_programs():
  """Frees what was compiled once it takes much memory.

  A process that keeps the programs of all its modules ends with 9 GB. To free
  them after each module has the next one trace again what many use, such as a
  tiny model and NumPy's functions, for up to 1.4 CPU-seconds.
  """
  yield
  trim()
  if psutil.Process().memory_info().rss > MEMORY:
    jax.clear_caches()
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    trim()


@pytest.fixture(autouse=True, scope='module')
def no_busy_thread():
  """Fails a module that leaves a thread which computes on.

  It would slow down all tests that follow in this process.
  """
  import busy_threads

  before = {*threading.enumerate()}
  yield
  left = busy_threads.busy(before, seconds=2.0)
  assert not left, (
    f'Threads {left} compute on when the tests of the module have ended: end '
    'them, or what they run.'
  )


def trim():
  """Returns freed memory to the system; glibc keeps most of it."""
  if TRIM is not None:
    TRIM(0)


@pytest.fixture(scope='module')
def recipe_library(tmp_path_factory):
  """Makes the modules that `fake_recipe` configures importable."""
  import fake_recipe

  with fake_recipe.library(tmp_path_factory.mktemp('library')):
    yield


@pytest.fixture
def recipe_folder(recipe_library, tmp_path, monkeypatch):
  """The current folder, with the recipe base.gin in it."""
  import fake_recipe

  monkeypatch.chdir(tmp_path)
  fake_recipe.write('base.gin', fake_recipe.BASE)
  return tmp_path


@pytest.fixture
def fully_optimized(monkeypatch):
  """Compiles as in production, where a test mostly runs what it compiles.

  Or where the bits of a NaN matter: XLA's older emitters of fusions make it a
  quiet one, in types of less than 32 bits.
  """
  options = compiler.get_compile_options

  def with_new_emitters(*args, **kwargs):
    flags = kwargs.pop('env_options_overrides', None) or {}
    if HAS_OLD_EMITTERS:
      flags = {'xla_cpu_use_fusion_emitters': True} | flags
    return options(*args, **kwargs, env_options_overrides=flags)

  monkeypatch.setattr(compiler, 'get_compile_options', with_new_emitters)
  for name in ('JAX_DISABLE_MOST_OPTIMIZATIONS', 'XLA_FLAGS'):
    monkeypatch.setenv(name, AS_FOUND[name])
  jax.config.update('jax_disable_most_optimizations', False)
  yield
  jax.config.update('jax_disable_most_optimizations', True)


# Options to choose tests, to share them between processes, to measure them.


def pytest_addoption(parser):
  group = parser.getgroup('rlinf_jax')
  group.addoption(
    '--claims',
    action='store_true',
    help='run tests marked `claims`, too: all seeds, plans and deaths',
  )
  group.addoption(
    '--share',
    type=pathlib.Path,
    metavar='FOLDER',
    help='share the test modules with all processes that name this folder',
  )
  group.addoption(
    '--costs',
    type=pathlib.Path,
    metavar='FILE',
    help="append each test's CPU and wall seconds to this file of JSON lines",
  )


def pytest_configure(config):
  """Refuses to share single tests: modules are imported when they are taken."""
  single = [arg for arg in config.args if '::' in arg]
  if config.option.share is not None and single:
    raise pytest.UsageError(
      f'--share shares whole modules, and {single[0]} is part of one: leave '
      '--share out, or name the module, and choose its tests by -k.'
    )


def pytest_collection_modifyitems(config, items):
  if config.option.claims:
    return
  kept, left_out = [], []
  for item in items:
    (left_out if item.get_closest_marker('claims') else kept).append(item)
  config.hook.pytest_deselected(items=left_out)
  items[:] = kept


exit_status = None  # Of a session that has begun.


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(exitstatus):
  global exit_status
  exit_status = exitstatus


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
  """Ends one of several processes without taking its objects apart.

  To free thousands of compiled programs one by one takes a minute.
  """
  if config.option.share is not None and exit_status is not None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)


def pytest_collection_finish():
  """Has no search for cycles visit what was imported: nearly a second each."""
  gc.freeze()


collected = []  # Modules to share.


class Module(pytest.Module):
  """A module of tests that is imported when this process takes it.

  To import all of them takes 15 CPU-seconds, and each process runs some.
  """

  is_taken = False

  def collect(self):
    if self.is_taken:
      return super().collect()
    collected.append(self)
    return []

  def take(self) -> list[pytest.Item]:
    """Imports the module; returns the tests that the options choose."""
    self.is_taken, session = True, self.session
    items = list(session.genitems(self))
    self.config.hook.pytest_collection_modifyitems(
      session=session, config=self.config, items=items
    )
    session.testscollected += len(items)
    return items


def pytest_pycollect_makemodule(module_path, parent):
  if parent.config.option.share is None:
    return None  # As pytest does.
  return Module.from_parent(parent, path=module_path)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
  """Runs the modules that no other process has taken yet."""
  folder = session.config.option.share
  if folder is None or session.testsfailed or session.config.option.collectonly:
    return None  # As pytest does.
  for some in taken(collected, folder):
    items = [item for module in some for item in module.take()]
    gc.freeze()
    for item, following in itertools.zip_longest(items, items[1:]):
      item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
      if session.shouldfail:
        raise session.Failed(session.shouldfail)
      if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
  return True


# CPU-seconds of the longest modules, as `--costs` measures them.
COSTS = pathlib.Path(__file__).parent / 'costs.json'
# Modules that one process takes together, by what is found in them. Ray gives
# the agent of a node 15 seconds to start, which are too few while others start
# as well, who runs vLLM imports it for five CPU-seconds, and who traces recipes
# imports all simulators for ten.
TOGETHER = {
  'ray': '^import (local_)?ray$',
  'vllm': '^import vllm_models$',
  'recipes': '^import one_simulator$',
}


def unit(module) -> str:
  """Name of a module, or of the modules that are taken with it."""
  if '/ray/' in module.nodeid:
    return 'ray'
  text = module.path.read_text()
  for name, line in TOGETHER.items():
    if re.search(line, text, re.M):
      return name
  return module.nodeid


def taken(modules, folder):
  """Yields modules that are taken together, each of them once by a file.

  Long ones come first: a long one at the end would run alone.
  """
  together, seconds = {}, json.loads(COSTS.read_text())
  for module in modules:
    name = unit(module)
    together.setdefault(name, []).append(module)
    seconds.setdefault(name, 5 if 'mark.slow' in module.path.read_text() else 0)
  folder.mkdir(parents=True, exist_ok=True)
  for name in sorted(together, key=lambda name: -seconds[name]):
    try:
      (folder / name.replace('/', '.')).touch(exist_ok=False)
    except FileExistsError:
      continue
    yield together[name]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
  file = item.config.option.costs
  if file is None:  # To look through all processes takes milliseconds.
    return (yield)
  cpu, wall = cpu_seconds(), time.monotonic()
  result = yield
  cost = {'test': item.nodeid}
  cost['cpu'] = round(cpu_seconds() - cpu, 2)
  cost['wall'] = round(time.monotonic() - wall, 2)
  with file.open('a') as costs:
    print(json.dumps(cost), file=costs)
  return result


ray_seconds = {}  # By process; of one that has died, those last seen.


def cpu_seconds():
  """CPU time of this process, of children that have ended, and of Ray's.

  Ray does not wait for the processes that it ends, which would count them.
  """
  for process in psutil.Process().children(recursive=True):
    with contextlib.suppress(psutil.Error):
      if process.name().startswith('ray::'):
        ray_seconds[process.pid] = sum(process.cpu_times()[:2])
  return sum(os.times()[:4]) + sum(ray_seconds.values())
