import importlib.util
from itertools import zip_longest
import os
import pathlib
import subprocess
import sys
import threading
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import busy_threads
import dimension_letters
from rlinf_jax.config import config
import shared_stages
import stages
from tests import conftest

SOURCE = """
import flax.linen as nn
import jax
import jax.numpy as jnp


def rank(x_BT):
  return x_BT.sum()


def letters(x_BT, y_TD):
  return None


def integer(x_BT):
  T = 7


def digit(x_B1):
  return x_B1


def early(x_BT):
  if x_BT is not None:
    return
  raise ValueError('Not reached.')


def raises(x_BT):
  raise KeyError('an error of its own')


def scanned(x_TB):
  def step(sum_B, x_B):
    return sum_B + x_B, None

  return jax.lax.scan(step, jnp.zeros(x_TB.shape[1]), x_TB)[0]


def mistaken(x_TB):
  return jax.lax.scan(lambda sum_B, x_TB: (sum_B + x_TB, None), x_TB[0], x_TB)


class Compact(nn.Module):
  @nn.compact
  def __call__(self, x_BD):
    up_DF = self.param('up_DF', nn.initializers.ones, (3, 5))
    return x_BD[:, :3] @ up_DF


class Setup(nn.Module):
  def setup(self):
    self.up_DF = self.param('up_DF', nn.initializers.ones, (3, 5))

  def __call__(self, x_BD):
    return x_BD[:, :3] @ self.up_DF


class Untouched(nn.Module):
  def setup(self):
    raise RuntimeError('Somebody asked for an attribute.')


class Holder(nn.Module):
  def setup(self):
    self.untouched = Untouched()

  def __call__(self, x_BD):
    return x_BD
"""


@pytest.fixture(scope='module')
def probe(tmp_path_factory):
  path = tmp_path_factory.mktemp('probe') / 'probe.py'
  path.write_text(SOURCE)
  loader = dimension_letters.Loader('probe', str(path))
  spec = importlib.util.spec_from_file_location('probe', path, loader=loader)
  module = importlib.util.module_from_spec(spec)
  loader.exec_module(module)
  return module


def test_true_names_pass(probe):
  x_BT = jnp.ones((2, 3))
  assert probe.rank(x_BT) == 6
  assert probe.letters(x_BT, jnp.ones((3, 4))) is None
  assert probe.integer(jnp.ones((2, 7))) is None
  assert probe.digit(jnp.ones((2, 1))).shape == (2, 1)
  assert probe.early(x_BT) is None
  assert probe.early.__code__.co_firstlineno == 23
  assert probe.scanned(x_BT).tolist() == [2, 2, 2]
  for module in (probe.Compact(), probe.Setup()):
    y, _ = module.init_with_output(jax.random.key(0), jnp.ones((2, 3)))
    assert y.shape == (2, 5)


@pytest.mark.parametrize('lift', [lambda f: f, jax.jit, jax.make_jaxpr])
def test_a_wrong_rank_is_an_error(probe, lift):
  with pytest.raises(AssertionError, match=r'rank: x_BT has shape \(3,\), of'):
    lift(probe.rank)(jnp.ones(3))


def test_a_mapped_array_has_lost_its_dimension(probe):
  with pytest.raises(AssertionError, match=r'rank: x_BT has shape \(3,\), of'):
    jax.vmap(probe.rank)(jnp.ones((2, 3)))
  assert jax.vmap(probe.rank)(jnp.ones((4, 2, 3))).tolist() == [6] * 4


def test_a_letter_has_one_size_in_a_function(probe):
  with pytest.raises(AssertionError, match='y_TD .* but T is 1 in x_BT'):
    probe.letters(jnp.ones((2, 1)), jnp.ones((3, 4)))
  with pytest.raises(AssertionError, match='x_BT .* but T is 7 in T'):
    probe.integer(jnp.ones((2, 3)))
  with pytest.raises(AssertionError, match='x_B1 .* but 1 is 1 in its name'):
    probe.digit(jnp.ones((2, 3)))
  with pytest.raises(AssertionError, match='x_BT'):
    probe.early(jnp.ones(3))


def test_a_lambda_is_a_function_too(probe):
  with pytest.raises(AssertionError, match='<lambda>: x_TB'):
    probe.mistaken(jnp.ones((2, 3)))


def test_parameters_of_a_module_are_checked(probe):
  with pytest.raises(
    AssertionError, match=r'__call__: up_DF .* D is 4 in x_BD'
  ):
    probe.Compact().init(jax.random.key(0), jnp.ones((2, 4)))
  with pytest.raises(AssertionError, match=r'self.up_DF .* D is 4 in x_BD'):
    probe.Setup().init(jax.random.key(0), jnp.ones((2, 4)))


def test_a_module_is_not_set_up_by_being_checked(probe):
  assert probe.Holder().apply({}, jnp.ones((2, 4))).shape == (2, 4)


def test_an_error_is_not_replaced(probe):
  with pytest.raises(KeyError, match='its own'):
    probe.raises(jnp.ones(3))


def test_other_threads_are_checked(probe):
  caught = []

  def work():
    with pytest.raises(AssertionError, match='x_BT'):
      probe.rank(jnp.ones(3))
    caught.append(True)

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert caught


def test_every_module_of_stages_is_loaded_by_the_check():
  from stages import metrics

  assert isinstance(metrics.__loader__, dimension_letters.Loader)
  assert metrics.__check__ is dimension_letters.check
  assert jax.device_count() == 8


def test_programs_that_a_thread_lowers_share_contexts():
  found = {}

  def lower(name, count):
    found[name] = [
      jax.jit(lambda x: x + i).lower(1.0).compiler_ir().context
      for i in range(count)
    ]

  thread = threading.Thread(target=lower, args=('other', 1))
  thread.start()
  thread.join()
  lower('mine', 5)
  # One more where the first has reached its limit.
  assert len({*found['mine']}) <= 2
  assert not {*found['mine']} & {*found['other']}


def test_stages_of_equal_functions_share_a_program_and_others_do_not():
  traced = []
  note = traced.append  # Equal to itself alone.

  def stage(scale, fn=jnp.sin):
    def run(x):
      note(scale)
      return scale * fn(x)

    return stages.Stage(run, 'run')

  with shared_stages.sharing() as programs:
    for scale in (1, 1, 1.0, True, np.ones(1), np.ones(1)):
      stage(scale)(jnp.ones(3))
    types_of = [type(x) for x in traced]
    # Arrays may change, so they share nothing.
    assert types_of == [int, float, bool, np.ndarray, np.ndarray]
    assert len(programs) == 3
    for fn in (jnp.cos, lambda x: x, lambda x: x, lambda x: -x):
      stage(1, fn)(jnp.ones(3))
    assert len(traced) == 5 + 4 and len(programs) == 3 + 4
    stage(1)(jnp.ones((2, 3)))  # Another shape is another program of JAX.
    assert len(traced) == 10 and len(programs) == 7
  stage(1)(jnp.ones(3))  # Elsewhere, each stage has its own.
  assert len(traced) == 11


@pytest.mark.parametrize('processes', [1, 2])
def test_processes_share_modules_and_each_test_runs_once(
  tmp_path, monkeypatch, processes
):
  monkeypatch.setattr(conftest, 'COSTS', tmp_path / 'costs.json')
  conftest.COSTS.write_text('{"tests/c_test.py": 3}')

  class Module(NamedTuple):
    nodeid: str
    path: pathlib.Path

  def module(name, text=''):
    path = tmp_path / name.replace('/', '.')
    path.write_text(text)
    return Module(f'tests/{name}_test.py', path)

  slow, ray = 'pytestmark = pytest.mark.slow\n', 'import pytest\nimport ray\n'
  modules = [
    *(module(name) for name in 'abc'),
    module('d', slow),
    *(module(f'ray/{name}') for name in 'ef'),
    module('g', ray),
    module('h', 'import local_ray\n'),
  ]
  shares = [conftest.taken(modules, tmp_path / 'of') for _ in range(processes)]
  turns = [
    some for turn in zip_longest(*shares) for some in turn if some is not None
  ]
  assert sorted(x for some in turns for x in some) == sorted(modules)
  assert turns[0] == modules[3:4]  # Longer than the costs of `c`.
  assert turns[1] == modules[2:3]
  assert modules[4:] in turns  # Rays start one by one.


def test_a_process_imports_the_modules_that_it_takes_alone(tmp_path):
  sources = {
    'raises': 'raise ValueError("broken")',
    'taken': 'import pathlib\npathlib.Path("imported").touch()',
    'fails': 'def test_one(): pass\ndef test_other(): assert 1 == 2',
    'passes': 'def test_one(): pass',
  }
  for name, source in sources.items():
    (tmp_path / f'{name}_test.py').write_text(source)
  (tmp_path / 'of').mkdir()
  (tmp_path / 'of/taken_test.py').touch()  # By another process.
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'pytest', '-q', '--share', 'of', '.'),
      *('--import-mode=importlib', '-p', 'tests.conftest'),
      *('-o', 'python_files=*_test.py'),
    ],
    cwd=tmp_path,
    env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 1, done.stdout + done.stderr
  *_, counts = done.stdout.strip().splitlines()
  assert counts.startswith('1 failed, 2 passed, 1 error in ')
  assert 'ValueError: broken' in done.stdout
  assert not (tmp_path / 'imported').exists()


def test_single_tests_are_not_shared(tmp_path):
  def configure(share, *args):
    option = types.SimpleNamespace(share=share)
    conftest.pytest_configure(types.SimpleNamespace(option=option, args=args))

  configure(None, 'a_test.py::test_one')
  configure(tmp_path, 'a_test.py', 'b')
  with pytest.raises(pytest.UsageError, match='a_test.py::test_one is part of'):
    configure(tmp_path, 'b', 'a_test.py::test_one')
  # Pytest shows the error after this, which ends a process that ran tests.
  option = types.SimpleNamespace(share=tmp_path)
  conftest.pytest_unconfigure(types.SimpleNamespace(option=option))


def test_a_thread_that_computes_on_is_named_until_it_ends(monkeypatch):
  # In so long it gets processor time on a busy machine, too.
  monkeypatch.setattr(busy_threads, 'WINDOW', 0.6)
  before = {*threading.enumerate()}
  ended, waits = threading.Event(), threading.Event()

  def compute():
    while not ended.is_set():
      pass

  threads = [
    threading.Thread(target=compute, name='computes'),
    threading.Thread(target=waits.wait, name='waits'),
  ]
  for thread in threads:
    thread.start()
  assert busy_threads.busy(before, seconds=0.5) == ['computes']
  ended.set()
  threads[0].join()
  assert busy_threads.busy(before, seconds=60) == []
  waits.set()


@pytest.mark.parametrize('order', ['first', 'second'])
def test_no_test_sees_the_recipe_of_another(order):
  assert not config.unused()
  config.parse([], [f'NAME = {order!r}'], 'runs/x')
  assert config.unused() == ['NAME']
