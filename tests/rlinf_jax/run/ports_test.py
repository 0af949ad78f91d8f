"""A run in one process listens on no port."""

import contextlib
import pathlib
import subprocess
import sys
import time

import psutil

import core_only

ROOT = pathlib.Path(__file__).parents[3]


def listening(pid):
  """Addresses on which a process and its children listen."""
  found = set()
  with contextlib.suppress(psutil.NoSuchProcess):  # It has just ended.
    parent = psutil.Process(pid)
    for one in [parent, *parent.children(recursive=True)]:
      with contextlib.suppress(psutil.NoSuchProcess):
        for connection in one.net_connections('inet'):
          if connection.status == psutil.CONN_LISTEN:
            found.add(connection.laddr)
  return found


def test_a_listener_is_seen():
  code = 'import socket; x = socket.create_server(("127.0.0.1", 0)); input()'
  process = subprocess.Popen(
    [sys.executable, '-S', '-c', code], stdin=subprocess.PIPE
  )
  end = time.monotonic() + 60
  while not listening(process.pid):
    assert time.monotonic() < end
    time.sleep(0.02)
  process.communicate(b'\n')


def test_a_run_without_ray_listens_on_no_port(tmp_path):
  process = subprocess.Popen(
    [
      sys.executable,
      '-m',
      'rlinf_jax.main',
      '--gin_file=gin_configs/ppo_push.gin',
      '--gin.STEPS=1',
      f'--workdir={tmp_path}/run',
    ],
    cwd=ROOT,
    env=core_only.environment() | {'JAX_PLATFORMS': 'cpu'},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  looks = 0
  while process.poll() is None:
    assert not listening(process.pid)
    looks += 1
    time.sleep(0.1)
  assert process.returncode == 0, process.stdout.read()
  assert looks > 10
  process.stdout.close()
