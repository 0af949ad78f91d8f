"""Pictures of questions: the columns that name them, and their places.

{"image": "a.png", "prompt": "How tall is it?", "answer": "7"}
{"images": ["a.png", "b.png"], "prompt": "<image> or <image>?", "answer": "b"}
{"messages": [{"role": "user", "content": [
  {"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}
]}], "answer": "a cube"}
"""

from collections.abc import Iterator, Mapping, Sequence
import os
import pathlib
import re
from typing import Any

COLUMNS = ('images', 'image')
MARKER = '<image>'  # The place of a picture in a text.
IMAGE, TEXT = 'image', 'text'  # Types of the parts of a message.
Image = pathlib.Path | bytes
Message = Mapping[str, Any]


def attach(
  prompt: str | Sequence[Message],
  row: Mapping[str, Any],
  folder: pathlib.Path,
  where: str,
  column: str | None = None,
) -> tuple[str | tuple[Message, ...], tuple[Image, ...]]:
  """A question with a place for each of its pictures, and the pictures.

  A text without markers has its pictures before it; messages have them before
  the first one of the user.

  Args:
    prompt: the question, or messages, whose contents may be lists of parts.
    row: the columns of its row.
    folder: what paths are relative to.
    where: file and line, for errors.
    column: the column of pictures; None for the first of `COLUMNS`, '' for
      none.

  Returns:
    The question and its pictures, in the order of their places. The contents of
    messages with pictures are lists of parts.

  Raises:
    ValueError: for a value that names no picture, or as many places as there
      are no pictures.
  """
  listed = _listed(row, column, folder, where)
  if isinstance(prompt, str):
    if listed is None:
      return prompt, ()
    count = prompt.count(MARKER)
    if not count:
      return MARKER * len(listed) + prompt, listed
    _check_count(count, listed, where)
    return prompt, listed
  messages = [
    {**m, 'content': _parts(m['content'], listed is not None)} for m in prompt
  ]
  named = [part for part in _images(messages) if IMAGE in part]
  places = [*_images(messages)]
  if listed and not places:
    first = next(i for i, m in enumerate(messages) if m['role'] == 'user')
    own = messages[first]['content']
    messages[first]['content'] = [{'type': IMAGE} for _ in listed] + own
    places = [*_images(messages)]
  _check_count(len(places) - len(named), listed or (), where)
  waiting = iter(listed or ())
  images = tuple(
    _image(part[IMAGE], folder, where) if IMAGE in part else next(waiting)
    for part in places
  )
  return tuple(map(_tidy, messages)), images


def parts(text: str) -> list[dict[str, str]]:
  """The parts of a text with markers: pictures, and what is between them."""
  return [
    {'type': IMAGE} if x == MARKER else {'type': TEXT, 'text': x}
    for x in re.split(f'({MARKER})', text)
    if x
  ]


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
  """The text of a message, without its pictures."""
  if isinstance(content, str):
    return content.replace(MARKER, '')
  return ''.join(x['text'] for x in content if x['type'] == TEXT)


def is_content(content: Any) -> bool:
  """Whether a message may have this content: text, or a list of parts."""
  if isinstance(content, str):
    return True
  return (
    isinstance(content, list)
    and bool(content)
    and all(_is_part(part) for part in content)
  )


def _is_part(part: Any) -> bool:
  if not isinstance(part, dict) or part.get('type') not in (IMAGE, TEXT):
    return False
  return part['type'] == IMAGE or isinstance(part.get('text'), str)


def _parts(content, has_markers: bool) -> list[dict[str, Any]]:
  """The content of a message as parts; keys without a value are left out."""
  if isinstance(content, str):
    return parts(content) if has_markers else [{'type': TEXT, 'text': content}]
  # In parquet, all parts have all keys.
  return [{k: v for k, v in x.items() if v is not None} for x in content]


def _images(messages) -> Iterator[dict[str, Any]]:
  """Yields the parts of messages that are pictures."""
  for message in messages:
    yield from (x for x in message['content'] if x['type'] == IMAGE)


def _tidy(message: Message) -> Message:
  """The message with text in place of parts, if it has no picture."""
  content = message['content']
  if any(x['type'] == IMAGE for x in content):
    bare = [{'type': IMAGE} if x['type'] == IMAGE else x for x in content]
    return {**message, 'content': bare}
  return {**message, 'content': text_of(content)}


def _check_count(places: int, images: Sequence[Image], where: str):
  if places != len(images):
    raise ValueError(
      f'{where} has {len(images)} pictures in a column of their own and '
      f'{places} places for them ({MARKER}, or parts of type "image" that name '
      'no picture): give each picture one place.'
    )


def _listed(
  row, column: str | None, folder: pathlib.Path, where: str
) -> tuple[Image, ...] | None:
  """The pictures in a row's column; None without such a column."""
  if column == '':
    return None
  if column is not None and column not in row:
    raise ValueError(
      f'{where} has no column {column!r} of pictures; its columns are '
      f'{", ".join(map(repr, row))}: bind image_column (IMAGES in gin) to one '
      'of them.'
    )
  name = column or next((x for x in COLUMNS if x in row), None)
  if name is None:
    return None
  value = row[name]
  if value is None or value == '':
    return ()
  values = value if isinstance(value, list) else [value]
  return tuple(_image(x, folder, where) for x in values)


def _image(value: Any, folder: pathlib.Path, where: str) -> Image:
  """The bytes of a picture, or the path of its file."""
  if isinstance(value, dict):  # As `datasets` stores pictures.
    value = value.get('bytes') or value.get('path')
  if isinstance(value, bytes):
    return value
  if not isinstance(value, str) or not value.strip() or '\0' in value:
    raise ValueError(
      f'{where} has {str(value)[:80]!r} in place of a picture: give the path '
      'of a file, or the bytes of a picture in a parquet file.'
    )
  if '://' in value or value.startswith('data:'):
    raise ValueError(
      f'{where} has the address {value[:80]!r} in place of a picture, and '
      'pictures are read from files: download it, and give its path.'
    )
  path = folder / os.path.expanduser(value)
  try:
    found = path.is_file()
  except OSError:  # A name that is too long.
    found = False
  if not found:
    raise ValueError(
      f'{where} names the picture {value[:200]!r}, and there is no such file '
      f'in {folder}: copy it there, or give its path relative to that folder. '
      "Of a column of other things, bind image_column = '' (IMAGES in gin), or "
      'give it another name.'
    )
  return path
