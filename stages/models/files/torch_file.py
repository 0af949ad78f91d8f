"""Files of torch.save with a dictionary of tensors, without torch.

Such a file is a ZIP archive of a pickle and of the bytes of each storage. The
pickle of a stranger could run any program, so that only what describes tensors
is understood.
"""

from collections.abc import Mapping
import io
import math
import pathlib
import pickle
import struct
from typing import Any, NamedTuple
import zipfile

import ml_dtypes
import numpy as np

from stages.models.files import weights

STORAGES = {
  'BFloat16Storage': np.dtype(ml_dtypes.bfloat16),
  'HalfStorage': np.dtype(np.float16),
  'FloatStorage': np.dtype(np.float32),
  'DoubleStorage': np.dtype(np.float64),
}
MOST_BYTES = 2**33  # Of a file: a larger one is no head of a policy.


class _Storage(NamedTuple):
  """The type and the bytes of a storage."""

  dtype: np.dtype
  content: bytes


class _State(dict):
  """An OrderedDict: those of torch's modules have an attribute, `_metadata`."""


def _tensor(storage, offset, shape, stride, *rest) -> np.ndarray:
  """A contiguous tensor; torch writes no other ones of parameters."""
  del rest
  size = math.prod(shape)
  steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
  wrong = [
    d for d in range(len(shape)) if shape[d] > 1 if stride[d] != steps[d]
  ]
  if wrong:
    raise pickle.UnpicklingError('a tensor is not contiguous')
  flat = np.frombuffer(storage.content, storage.dtype)[offset : offset + size]
  return flat.reshape(shape)


class _Unpickler(pickle.Unpickler):
  """Reads dictionaries of tensors, and refuses all else."""

  def __init__(self, archive: zipfile.ZipFile, root: str):
    super().__init__(io.BytesIO(archive.read(f'{root}data.pkl')))
    self.archive, self.root = archive, root

  def find_class(self, module, name):
    if (module, name) == ('collections', 'OrderedDict'):
      return _State
    if (module, name) == ('torch._utils', '_rebuild_tensor_v2'):
      return _tensor
    if module == 'torch' and name in STORAGES:
      return STORAGES[name]
    raise pickle.UnpicklingError(f'it holds {module}.{name}')

  def persistent_load(self, pid):
    _, dtype, key, _, _ = pid
    content = self.archive.read(f'{self.root}data/{key}')
    return _Storage(dtype, content)


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
  """The tensors of a file by name.

  Raises:
    CheckpointError: if it is no such file, or holds other things than tensors.
  """
  try:
    if path.stat().st_size > MOST_BYTES:
      raise ValueError(f'it has more than {MOST_BYTES} bytes')
    with zipfile.ZipFile(path) as archive:
      if sum(x.file_size for x in archive.infolist()) > MOST_BYTES:
        raise ValueError(f'it unpacks to more than {MOST_BYTES} bytes')
      root = next(
        x[: -len('data.pkl')]
        for x in archive.namelist()
        if x.endswith('/data.pkl')
      )
      found = _Unpickler(archive, root).load()
    if not isinstance(found, dict) or not all(
      isinstance(k, str) and isinstance(v, np.ndarray) for k, v in found.items()
    ):
      raise ValueError('it holds no dictionary of tensors')
  except MemoryError:
    raise
  # A wrong pickle may raise any exception.
  except Exception as error:
    raise weights.CheckpointError(
      f'{path} is not a file of tensors by torch.save ({error!r:.200}): copy '
      'it again, or do not trust it.'
    ) from error
  return dict(found)


def write(path: pathlib.Path, tensors: Mapping[str, np.ndarray]):
  """Writes tensors so that torch.load returns an OrderedDict of them."""
  names = {dtype: name for name, dtype in STORAGES.items()}
  body = [b'\x80\x02', _call('collections', 'OrderedDict', b')'), b'(']
  for i, (key, tensor) in enumerate(tensors.items()):
    storage = b'(%s%s%s%s%st' % (
      _value('storage'),
      _global('torch', names[tensor.dtype]),
      _value(str(i)),
      _value('cpu'),
      _value(tensor.size),
    )
    steps = [math.prod(tensor.shape[d + 1 :]) for d in range(tensor.ndim)]
    arguments = b'(%sQ%s%s%s\x89%st' % (
      storage,
      _value(0),
      _value(tensor.shape),
      _value(steps),
      _call('collections', 'OrderedDict', b')'),
    )
    body += [
      _value(key),
      _call('torch._utils', '_rebuild_tensor_v2', arguments),
    ]
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr(f'{path.stem}/data.pkl', b''.join([*body, b'u.']))
    archive.writestr(f'{path.stem}/byteorder', 'little')
    for i, tensor in enumerate(tensors.values()):
      archive.writestr(f'{path.stem}/data/{i}', tensor.tobytes())
    archive.writestr(f'{path.stem}/version', '3\n')


def _global(module: str, name: str) -> bytes:
  """Pickle's words for a name of a module."""
  return f'c{module}\n{name}\n'.encode()


def _call(module: str, name: str, arguments: bytes) -> bytes:
  """Pickle's words for a call, of arguments in its words."""
  return _global(module, name) + arguments + b'R'


def _value(x: Any) -> bytes:
  """Pickle's words for a text, a number or a tuple of numbers."""
  if isinstance(x, str):
    return b'X' + struct.pack('<I', len(x.encode())) + x.encode()
  if isinstance(x, int):
    content = x.to_bytes(9, 'little')
    return b'\x8a' + bytes([len(content)]) + content
  return b'(' + b''.join(map(_value, x)) + b't'
