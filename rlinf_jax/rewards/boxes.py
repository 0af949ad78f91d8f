r"""Answers in `\boxed{}`."""

# An answer is at the end; the text before only costs time.
MAX_CHARACTERS = 10_000


def content(text: str) -> str | None:
  r"""The content of the last `\boxed{…}`; None if there is none that closes."""
  box, depth = text.rfind('\\boxed'), 0
  start = -1 if box < 0 else text.find('{', box)
  if start < 0:
    return None
  for i in range(start, len(text)):
    depth += (text[i] == '{') - (text[i] == '}')
    if depth == 0:
      return text[start + 1 : i]
  return None
