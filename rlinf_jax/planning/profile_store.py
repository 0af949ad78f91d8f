"""What was measured before, by a fingerprint of all that it depends on."""

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
  """$RLINF_JAX_CACHE, or a folder of the user's cache."""
  named = os.environ.get('RLINF_JAX_CACHE')
  if named:
    return pathlib.Path(named)
  cache = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(cache) / 'rlinf_jax'


def machine() -> dict[str, Any]:
  """What seconds depend on besides the program: hardware and versions."""
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
  """The model of the processor, as far as the system tells it."""
  info = pathlib.Path('/proc/cpuinfo')
  lines = info.read_text().splitlines() if info.exists() else []
  names = [x.split(':')[1].strip() for x in lines if x.startswith('model name')]
  return names[0] if names else platform.processor()


class Store:
  """Measurements in a folder, a file each."""

  def __init__(self, where: pathlib.Path | None = None):
    self._where = where or folder()
    self._machine = machine()

  def _file(self, what: Mapping[str, Any]) -> pathlib.Path:
    told = json.dumps({**what, 'machine': self._machine}, sort_keys=True)
    name = hashlib.sha256(told.encode()).hexdigest()[:32]
    return self._where / f'{name}.json'

  def get(self, what: Mapping[str, Any]) -> Any | None:
    """What was measured of this, on a machine like this; None if nothing."""
    file = self._file(what)
    try:
      return json.loads(file.read_text())['measured']
    except (OSError, ValueError, KeyError):
      return None  # What cannot be read is measured again.

  def put(self, what: Mapping[str, Any], measured: Any):
    """Remembers it. A disk that is full or closed costs the memory alone."""
    file = self._file(what)
    # What it was measured of is its name; who reads the file wants words.
    words = {k: v for k, v in what.items() if k != 'program'}
    told = {**words, 'machine': self._machine, 'measured': measured}
    part = file.with_suffix(f'.{os.getpid()}.part')
    try:
      self._where.mkdir(parents=True, exist_ok=True)
      part.write_text(json.dumps(told, indent=2))
      part.replace(file)
    except OSError:
      with contextlib.suppress(OSError):
        part.unlink()
