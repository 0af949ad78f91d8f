"""Connects a run to a Ray cluster, which admits those who know its token."""

import os
import secrets
import warnings

import ray
from ray._private.authentication import (
  authentication_token_setup as token_setup,
)

from rlinf_jax.runtime.ray.transport import network

HERE = 'local'  # In place of an address: Ray is started on this machine.
# Ray would start a process for each processor at once, which no place uses:
# those start with environment variables of their own.
SYSTEM = {'prestart_worker_first_driver': False}
TOKEN_SETTINGS = {'RAY_AUTH_MODE', 'RAY_AUTH_TOKEN', 'RAY_AUTH_TOKEN_PATH'}


def connect(address: str = HERE):
  """Connects to Ray, or starts it on this machine; once per process.

  Ray runs code for every process that it admits, so it must admit only those
  that know its token. That of a Ray that is started here is drawn at random
  unless the environment sets one.

  Args:
    address: 'local', 'auto', or that of a cluster, such as 'ray://head:10001'.

  Raises:
    ConnectionError: if no cluster is at that address, or Ray does not start.
    ValueError: if the environment turns tokens off, or has none for a cluster.
  """
  if ray.is_initialized():
    return
  _check_mode()
  options = {'log_to_driver': False, 'logging_level': 'error'}
  if address == HERE:
    # By default, Ray reads a token of all runs from a file of the user. It
    # turns authentication on by itself, and only while the mode is not set:
    # it has read the environment when it was imported.
    if not TOKEN_SETTINGS & os.environ.keys():
      os.environ['RAY_AUTH_TOKEN'] = secrets.token_hex(32)
    # Actors wait more than they compute: few processors must not limit them.
    cpus = max(64, len(os.sched_getaffinity(0)))
    with network.ray_on_loopback(), warnings.catch_warnings():
      # JAX warns of it, but the processes of Ray become other programs at once.
      warnings.filterwarnings('ignore', r'os\.fork\(\) was called')
      try:
        ray.init('local', num_cpus=cpus, _system_config=SYSTEM, **options)
      except Exception as error:  # Ray raises `Exception` itself, too.
        raise ConnectionError(
          'Ray did not start on this machine, which can be short of memory, of '
          f'disk or of processes: {" ".join(str(error).split())}'
        ) from error
    return
  # By itself, Ray uses a token for the address 'auto' only.
  if not token_setup.maybe_enable_token_auth_if_token_available(False):
    raise ValueError(
      f'There is no token for the Ray cluster at {address!r}, which without '
      'one runs code for every process that reaches it: set '
      'RAY_AUTH_MODE=token and the same secret RAY_AUTH_TOKEN for every `ray '
      'start` and for this run.'
    )
  try:
    ray.init(address, **options)
  except ConnectionError as error:
    raise ConnectionError(
      f'There is no Ray cluster at {address!r}: start one with `ray start '
      "--head`, or say 'local' to have one on this machine."
    ) from error


def _check_mode():
  """Checks that the environment does not turn Ray's tokens off."""
  mode = os.environ.get('RAY_AUTH_MODE', 'token')
  if mode.lower() != 'token':
    raise ValueError(
      f'RAY_AUTH_MODE is {mode!r}, so that Ray would run code for every '
      "process that reaches its ports: unset it, or set it to 'token'."
    )
