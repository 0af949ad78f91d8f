"""Rewards of the form of a completion, as functions of a `base.Completion`."""

from rlinf_jax.rewards import base, final_answer, pool


def correct(
  *,
  seconds: float = 5.0,
  memory: float = 2.0,
  processes: int | None = None,
) -> base.Batched:
  """1 for the right final answer, see `answers.correct`; in isolated processes.

  Args:
    seconds: as `pool.isolated`.
    memory: likewise.
    processes: likewise.
  """
  # By name: sympy takes seconds to import, and this process needs none of it.
  return pool.named(
    'rlinf_jax.rewards.answers',
    'correct',
    seconds=seconds,
    memory=memory,
    processes=processes,
  )


def boxed(completion: base.Completion) -> float:
  r"""1 if a completion has one `\boxed{}`, and that with something in it."""
  text = completion.text[-final_answer.MAX_CHARACTERS :]
  inside = final_answer.in_box(text) or ''
  return float(text.count('\\boxed') == 1 and bool(inside.strip()))


def thinks(completion: base.Completion, *, is_open: bool = False) -> float:
  """1 if a completion is `<think>…</think>` and then an answer, each once.

  Args:
    completion: its text.
    is_open: whether `<think>` is the end of the prompt, where some chat
      templates write it, and not the beginning of the completion.
  """
  text = f'<think>{completion.text}' if is_open else completion.text
  before, start, rest = text.partition('<think>')
  thought, end, answer = rest.partition('</think>')
  tags = text.count('<think>'), text.count('</think>')
  complete = start and end and tags == (1, 1)
  return float(
    bool(complete and not before.strip() and thought.strip() and answer.strip())
  )


def within_length(completion: base.Completion, *, buffer: int = 64) -> float:
  """0 to −1 over the last tokens before the limit, arXiv:2503.14476 eq. 13.

    0                          where |y| ≤ L − C
    ((L − C) − |y|) / C        where L − C < |y| ≤ L

  Args:
    completion: |y| and L are its `tokens` and `limit`.
    buffer: C, tokens.
  """
  over = completion.tokens - (completion.limit - buffer)
  return -min(max(over / buffer, 0.0), 1.0)


def finishes(completion: base.Completion) -> float:
  """1 if a completion ends before the limit of tokens."""
  return float(not completion.truncated)
