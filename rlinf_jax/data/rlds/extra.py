"""google-crc32c and protobuf, which come with the extra 'rlds'."""

import functools
from typing import Any


def _missing(name: str) -> ImportError:
  return ImportError(
    f'RLDS data sets need {name}, which is not installed: pip install '
    '"rlinf-jax[rlds]".'
  )


def checksum(data: bytes) -> int:
  """The masked CRC-32C of bytes, as TFRecord files store it.

  Raises:
    ImportError: without google-crc32c.
  """
  try:
    import google_crc32c
  except ImportError as error:
    raise _missing('google-crc32c') from error
  crc = google_crc32c.value(data)
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def example(content: bytes) -> Any:
  """The message `tf.train.Example` that bytes encode.

  Raises:
    ImportError: without protobuf.
    ValueError: if they encode no such message.
  """
  kind = _example()
  from google.protobuf import message

  try:
    return kind.FromString(content)
  except message.DecodeError as error:
    raise ValueError(str(error)) from error


@functools.cache
def _example() -> Any:
  """The class of `tf.train.Example`, from its field numbers in TensorFlow.

  A map of protobuf is encoded as a list of entries, which it is here: entries
  keep their order.
  """
  try:
    from google.protobuf import (
      descriptor_pb2,
      descriptor_pool,
      message_factory,
    )
  except ImportError as error:
    raise _missing('protobuf') from error
  kind = descriptor_pb2.FieldDescriptorProto
  lists = {
    'BytesList': kind.TYPE_BYTES,
    'FloatList': kind.TYPE_FLOAT,
    'Int64List': kind.TYPE_INT64,
  }
  file = descriptor_pb2.FileDescriptorProto(
    name='rlinf_jax/example.proto', package='rlinf_jax', syntax='proto3'
  )

  def message(name: str, **fields: Any):
    """Adds a message whose fields are numbered from 1: (type, repeated)."""
    added = file.message_type.add(name=name)
    for number, (field, (of, repeated)) in enumerate(fields.items(), 1):
      label = kind.LABEL_REPEATED if repeated else kind.LABEL_OPTIONAL
      described = added.field.add(name=field, number=number, label=label)
      if isinstance(of, str):
        described.type, described.type_name = kind.TYPE_MESSAGE, of
      else:
        described.type = of

  for name, of in lists.items():
    message(name, value=(of, True))
  message('Feature', **{x: (f'.rlinf_jax.{x}', False) for x in lists})
  message(
    'Entry', key=(kind.TYPE_STRING, False), value=('.rlinf_jax.Feature', False)
  )
  message('Features', feature=('.rlinf_jax.Entry', True))
  message('Example', features=('.rlinf_jax.Features', False))
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  found = pool.FindMessageTypeByName('rlinf_jax.Example')
  return message_factory.GetMessageClass(found)
