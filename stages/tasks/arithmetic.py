"""Addition of long numbers, worked out digit by digit.

A problem is `347+58=`. A worked answer adds the columns from the right, each
with its carry, and then says the sum: `7+8=15,4+5+1=10,3+1=4;405`. Only the
last number of a completion is verified, even if the completion was cut off, so
a policy may work in another way.
"""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import stages
from stages import base, ranges
from stages.language import tokens

NUMBER = re.compile(r'\d+')
HELD_OUT = 16  # One pair in 16 is held out from training.
TEMPLATE = '{a}+{b}='


class Digits(NamedTuple):
  """Range of operand lengths in digits, within 1 … 9: sums fit in 32 bits."""

  min: int = 3
  max: int = 4


def worked_answer(a: int, b: int) -> str:
  """A worked answer to `a + b`."""
  columns, carry = [], 0
  longest = max(len(str(a)), len(str(b)))
  for x, y in zip(*(str(n)[::-1].ljust(longest) for n in (a, b)), strict=True):
    digits = [d for d in (x, y) if d != ' '] + ['1'] * carry
    total = sum(map(int, digits))
    columns.append(f'{"+".join(digits)}={total}')
    carry = total // 10
  return f'{",".join(columns)};{a + b}'


def is_held_out(a, b):
  """Whether a pair is held out from training, in either order."""
  low, high = np.minimum(a, b), np.maximum(a, b)
  return (low * 7919 + high * 104729) // 7 % HELD_OUT == 0


def pairs(rng, rows: int, digits: Digits, held_out: bool):
  """`rows` pairs of operands, with uniformly distributed lengths."""
  if not 1 <= digits.min <= digits.max <= 9:
    raise ValueError(
      f'Operands of {digits.min} to {digits.max} digits were asked for: '
      'give Digits(min, max) with 1 <= min <= max <= 9.'
    )
  kept = np.zeros((0, 2), np.int64)
  while len(kept) < rows:
    n = rng.integers(digits.min, digits.max + 1, (4 * rows * HELD_OUT, 2))
    pair = rng.integers(10 ** (n - 1), 10**n)
    kept = np.concatenate([kept, pair[is_held_out(*pair.T) == held_out]])
  return kept[:rows]


def _problem(tokenizer, pair, template, chat, prompt_length) -> base.Problem:
  texts = [template.format(a=a, b=b) for a, b in pair]
  if chat:
    texts = [
      tokenizer.apply_chat_template(
        [{'role': 'user', 'content': text}],
        tokenize=False,
        add_generation_prompt=True,
      )
      for text in texts
    ]
  prompt = tokens.encode_prompts(tokenizer, texts, prompt_length)
  return base.Problem(prompt, pair.sum(1).astype(np.int32))


def _source(tokenizer, make, held_out) -> base.Source:
  """A source whose batches depend on the seed and the batch number only."""

  def init(seed):
    return {'seed': np.array(seed), 'batch': np.array(0)}

  def advance(state, metrics):
    del metrics  # There is no curriculum.
    rng = np.random.default_rng([int(state['seed']), int(state['batch'])])
    # NumPy returns a scalar, not an array, for a sum of 0-d arrays.
    batch = np.asarray(state['batch'] + 1)
    return {**state, 'batch': batch}, make(rng)

  return base.Source(
    init, advance, held_out, lambda *rows: tokens.decode(tokenizer, *rows)
  )


def _held_out(tokenizer, digits, rows, batch, template, chat, prompt_length):
  if rows % batch:
    raise ValueError(
      f'{rows} held-out problems cannot be cut into batches of {batch}: make '
      'held_out a multiple of held_out_batch.'
    )

  def batches():
    pair = pairs(np.random.default_rng(2**20), rows, digits, True)
    return [
      _problem(tokenizer, part, template, chat, prompt_length)
      for part in np.split(pair, rows // batch)
    ]

  return batches


def problems(
  checkpoint: str,
  *,
  batch_size: ranges.PositiveInt,
  prompt_length: ranges.PositiveInt,
  digits: Digits = Digits(),
  held_out: ranges.HeldOut = 512,
  held_out_batch: ranges.PositiveInt = 256,
  template: str = TEMPLATE,
  chat: bool = False,
) -> base.Source:
  """A source of problems to solve, never those of the held-out set.

  Args:
    checkpoint: folder of the model whose tokenizer to use.
    batch_size: problems a batch.
    prompt_length: tokens that prompts are padded to.
    digits: range of operand lengths.
    held_out: number of problems held out for evaluation.
    held_out_batch: number of them in a batch.
    template: the text of a problem, in terms of `{a}` and `{b}`.
    chat: whether to wrap the text in the tokenizer's chat template.
  """
  tokenizer = tokens.load_tokenizer(checkpoint)
  shape = template, chat, prompt_length

  def make(rng):
    return _problem(tokenizer, pairs(rng, batch_size, digits, False), *shape)

  batches = _held_out(tokenizer, digits, held_out, held_out_batch, *shape)
  return _source(tokenizer, make, batches)


def examples(
  checkpoint: str,
  *,
  batch_size: ranges.PositiveInt,
  prompt_length: ranges.PositiveInt,
  response_length: ranges.PositiveInt,
  digits: Digits = Digits(),
  held_out: ranges.HeldOut = 512,
  held_out_batch: ranges.PositiveInt = 256,
) -> base.Source:
  """A source of worked examples to imitate, never of held-out problems.

  Args:
    checkpoint: folder of the model whose tokenizer to use.
    batch_size: examples a batch.
    prompt_length: tokens that prompts are padded to.
    response_length: tokens that worked answers are padded to.
    digits: range of operand lengths.
    held_out: number of problems held out for evaluation.
    held_out_batch: number of them in a batch.
  """
  tokenizer = tokens.load_tokenizer(checkpoint)
  shape = TEMPLATE, False, prompt_length

  def make(rng):
    pair = pairs(rng, batch_size, digits, False)
    prompt = _problem(tokenizer, pair, *shape).prompt
    answers = [worked_answer(int(a), int(b)) for a, b in pair]
    return base.Example(
      prompt, *tokens.encode_completions(tokenizer, answers, response_length)
    )

  batches = _held_out(tokenizer, digits, held_out, held_out_batch, *shape)
  return _source(tokenizer, make, batches)


def corpus(num_problems: int = 1000) -> list[str]:
  """Texts of the task, to train a tokenizer on."""
  pair = pairs(np.random.default_rng(0), num_problems, Digits(1, 6), False)
  return [
    TEMPLATE.format(a=a, b=b) + worked_answer(int(a), int(b)) for a, b in pair
  ]


def verify(checkpoint: str) -> stages.Stage:
  """A stage `answer, action, mask -> Verdict`: is the last number right?

  Args:
    checkpoint: folder of the model whose tokenizer to decode with.
  """
  tokenizer = tokens.load_tokenizer(checkpoint)

  def verify_texts(answer_B, action_BT, mask_BT) -> base.Verdict:
    texts = tokens.decode(tokenizer, action_BT, mask_BT)
    numbers = [NUMBER.findall(text)[-1:] for text in texts]
    right_B = np.array(
      [n == [str(a)] for n, a in zip(numbers, answer_B.tolist(), strict=True)],
      np.float32,
    )
    vote_B = tokens.text_ids([n[0] if n else None for n in numbers])
    return base.Verdict(right_B, right_B, vote=vote_B)

  def out_shapes(answer, action, mask):
    del answer, mask
    row = jax.ShapeDtypeStruct(action.shape[:1], jnp.float32)
    vote = jax.ShapeDtypeStruct(row.shape, jnp.int32)
    return base.Verdict(row, row, vote=vote)

  return stages.Stage(verify_texts, 'reward', host=True, out_shapes=out_shapes)
