"""Stores measurements by a fingerprint of everything that they depend on."""

from collections.abc import Mapping
import contextlib
import hashlib
import json
import os
import pathlib
import platform
from typing import Any

import jax
import jaxlib


def folder() -> pathlib.Path:
  """Returns $RLINF_JAX_CACHE, or a folder in the user's cache."""
  named = os.environ.get('RLINF_JAX_CACHE')
  if named:
    return pathlib.Path(named)
  cache = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(cache) / 'rlinf_jax'


def machine() -> dict[str, Any]:
  """Describes the hardware and versions that measured seconds depend on."""
  device = jax.devices()[0]
  return {
    'device': device.device_kind,
    'devices': len(jax.devices()),
    'cores': len(os.sched_getaffinity(0)),
    'processor': _processor(),
    'platform': device.client.platform_version,
    'flags': os.environ.get('XLA_FLAGS', ''),
    'x64': bool(jax.config.jax_enable_x64),
    'jax': [jax.__version__, jaxlib.__version__],
  }


def _processor() -> str:
  """Returns the model of the processor, as far as it is known."""
  info = pathlib.Path('/proc/cpuinfo')
  lines = info.read_text().splitlines() if info.exists() else []
  names = [x.split(':')[1].strip() for x in lines if x.startswith('model name')]
  return names[0] if names else platform.processor()


class Store:
  """Stores each measurement in a file of a folder."""

  def __init__(self, where: pathlib.Path | None = None):
    self._where = where or folder()
    self._machine = machine()

  def _file(self, what: Mapping[str, Any]) -> pathlib.Path:
    key = json.dumps({**what, 'machine': self._machine}, sort_keys=True)
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return self._where / f'{name}.json'

  def get(self, what: Mapping[str, Any]) -> Any | None:
    """Returns an earlier measurement on an equal machine, or None."""
    file = self._file(what)
    try:
      return json.loads(file.read_text())['measured']
    except (OSError, ValueError, KeyError, TypeError):
      return None  # An unreadable file is measured again.

  def put(self, what: Mapping[str, Any], measured: Any):
    """Stores a measurement; an unwritable disk is not an error."""
    file = self._file(what)
    # The program is only part of the fingerprint, as its text is long.
    labels = {k: v for k, v in what.items() if k != 'program'}
    data = {**labels, 'machine': self._machine, 'measured': measured}
    part = file.with_suffix(f'.{os.getpid()}.part')
    try:
      self._where.mkdir(parents=True, exist_ok=True)
      part.write_text(json.dumps(data, indent=2))
      part.replace(file)
    except OSError:
      with contextlib.suppress(OSError):
        part.unlink()
