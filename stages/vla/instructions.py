"""Instructions as tokens, in the published prompts of each family of models.

An encoder turns tasks, such as 'push the puck to the green disc', into a
`base.Prompt` with one row a task, padded on the right. Environments and
demonstrations put the row of an episode into its observations, under
`base.PROMPT`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int
import numpy as np

from stages import base, ranges, tree_paths
from stages.envs import env as env_lib
from stages.language import tokens

SPACE = '▁'  # Llama's token of a single space, id 29871.
END = ';\nAction: '  # Of π0.5's prompts, behind the state.
NAMES = tuple(f'{base.PROMPT}/{name}' for name in base.Prompt._fields)


def openvla(
  tasks: Sequence[str], *, checkpoint: str, length: ranges.PositiveInt = 48
) -> base.Prompt:
  """Prompts of OpenVLA and OpenVLA-OFT.

  Tokens are BOS and those of `openvla_text`. The token of a single space is
  appended if the tokenizer has one, as actions followed it in training.

  Args:
    tasks: what is to be done, one text a row.
    checkpoint: folder of the model, whose tokenizer is used.
    length: P, columns of a prompt.

  Raises:
    ValueError: for a task without text, with characters that the tokenizer does
      not know, or with more tokens than columns.
  """
  tokenizer = tokens.load_tokenizer(checkpoint)
  space = tokenizer.get_vocab().get(SPACE)

  def encode(task: str) -> list[int]:
    row = _begun(tokenizer, openvla_text(task), checkpoint)
    return row if space in (None, row[-1]) else [*row, space]

  return _padded(tasks, encode, length)


def openvla_text(task: str) -> str:
  """The published prompt of an instruction, without the first token."""
  return f'In: What action should the robot take to {task.lower()}?\nOut:'


def pi0(
  tasks: Sequence[str], *, checkpoint: str, length: ranges.PositiveInt = 48
) -> base.Prompt:
  """Prompts of π0: the task in PaliGemma's tokens, and a new line.

  As in openpi, underscores and new lines within the task become spaces.

  Args:
    tasks: as for `openvla`.
    checkpoint: likewise.
    length: likewise.

  Raises:
    ValueError: likewise.
  """
  tokenizer = tokens.load_tokenizer(checkpoint)

  def encode(task: str) -> list[int]:
    task = task.strip().replace('_', ' ').replace('\n', ' ')
    return _begun(tokenizer, f'{task}\n', checkpoint)

  return _padded(tasks, encode, length)


def utf8(
  tasks: Sequence[str], *, length: ranges.PositiveInt = 48
) -> base.Prompt:
  """The bytes of each task, 0 … 255, for models that are trained from nothing.

  Such a model needs no tokenizer, and a vocabulary of 256.

  Args:
    tasks: as for `openvla`.
    length: P, columns of a prompt.

  Raises:
    ValueError: for a task without text, or with more bytes than columns.
  """
  return _padded(tasks, lambda task: [*task.strip().encode()], length)


class StateTokens(NamedTuple):
  """Tokens by which π0.5's instruction tells the state, behind the task.

  Attributes:
    number: token ids of each bin, −1 … 255, padded on the right.
    is_token: 1 on token ids, 0 on that padding.
    end: token ids behind the last number.
  """

  number: Int[Array, 'bins tokens']
  is_token: Int[Array, 'bins tokens']
  end: Int[Array, ' tokens']

  def follow(self, prompt: base.Prompt, state_BO) -> base.Prompt:
    """A prompt with the numbers of a state behind it.

    Tokens are those of `pi05_text`. Between them is padding, which has no
    position, so that it changes nothing.

    Args:
      prompt: of `pi05`, with B rows.
      state_BO: normalized to −1 … 1; lower numbers are in bin −1, as in openpi,
        and higher ones in bin 255.
    """
    edges = np.linspace(-1.0, 1.0, len(self.number))[:-1]
    # The first row of the table is bin −1.
    bin_BO = jnp.searchsorted(
      jnp.asarray(edges, state_BO.dtype), state_BO, side='right'
    )
    B = len(state_BO)
    token, mask = (
      jnp.asarray(x)[bin_BO].reshape(B, -1)
      for x in (self.number, self.is_token)
    )
    end = jnp.broadcast_to(jnp.asarray(self.end)[None], (B, len(self.end)))
    return base.Prompt(
      jnp.concatenate([prompt.token, token, end], axis=1),
      jnp.concatenate(
        [prompt.mask, mask.astype(prompt.mask.dtype), jnp.ones_like(end)],
        axis=1,
        dtype=prompt.mask.dtype,
      ),
    )


def pi05_text(task: str, state_O) -> str:
  """The instruction of π0.5, with the state in 256 bins, as in openpi.

  Args:
    task: what is to be done.
    state_O: the robot's state, normalized to −1 … 1.
  """
  edges = np.linspace(-1.0, 1.0, 257)[:-1]
  bins = np.digitize(np.asarray(state_O), edges) - 1
  task = task.strip().replace('_', ' ').replace('\n', ' ')
  return f'Task: {task}, State: {" ".join(map(str, bins))};\nAction: '


def pi05(
  tasks: Sequence[str], *, checkpoint: str, length: ranges.PositiveInt = 48
) -> base.Prompt:
  """The part of π0.5's prompts before the state; see `StateTokens`.

  Args:
    tasks: as for `openvla`.
    checkpoint: likewise.
    length: likewise.

  Raises:
    ValueError: likewise.
  """
  tokenizer = tokens.load_tokenizer(checkpoint)

  def encode(task: str) -> list[int]:
    text = pi05_text(task, ()).removesuffix(f' {END}')
    return _begun(tokenizer, text, checkpoint)

  return _padded(tasks, encode, length)


def state_tokens(checkpoint: str) -> StateTokens:
  """The table by which a state becomes tokens, also within a compiled step.

  Args:
    checkpoint: folder of the model, whose tokenizer is used.

  Raises:
    ValueError: for a tokenizer that merges numbers with the text around them.
  """
  tokenizer = tokens.load_tokenizer(checkpoint)
  encode = lambda text: tokenizer(text, add_special_tokens=False)['input_ids']
  before, end = encode('State:'), encode(END)

  def middle(numbers: str) -> list[int]:
    text = f'State: {numbers}{END}'
    row = encode(text)
    inner = row[len(before) : len(row) - len(end)]
    lost = tokens.lost_characters(tokenizer, text, row)
    if lost or [*before, *inner, *end] != row:
      raise ValueError(
        f'The tokenizer of {checkpoint} does not write the state {numbers!r} '
        'as tokens of its own, which π0.5 needs: give that of PaliGemma.'
      )
    return inner

  rows = [middle(str(b)) for b in range(-1, 256)]
  for b, row in enumerate(rows, -1):  # Each number before another one.
    if middle(f'{b} {254 - b}') != [*row, *rows[255 - b]]:
      raise ValueError(
        f'The tokenizer of {checkpoint} merges {b} and the number behind it, '
        'and π0.5 needs their own tokens: give that of PaliGemma.'
      )
  number_NP = np.zeros((len(rows), max(map(len, rows))), np.int32)
  mask_NP = np.zeros_like(number_NP)
  for i, row in enumerate(rows):
    number_NP[i, : len(row)] = row
    mask_NP[i, : len(row)] = 1
  return StateTokens(number_NP, mask_NP, np.array(end, np.int32))


def _begun(tokenizer, text: str, checkpoint: str) -> list[int]:
  """Tokens of a text, the first of which is the beginning of the text."""
  first = tokenizer.bos_token_id
  first = tokenizer.eos_token_id if first is None else first
  if first is None:
    raise ValueError(
      f'The tokenizer of {checkpoint} has no token for the beginning of a text '
      '(bos_token): copy the tokenizer_config.json of the model.'
    )
  row = [*tokenizer(text, add_special_tokens=False)['input_ids']]
  lost = tokens.lost_characters(tokenizer, text, row)
  if lost:
    raise ValueError(
      f'The instruction {text!r} has {sorted(lost)}, which the tokenizer of '
      f'{checkpoint} cannot encode: remove these characters.'
    )
  return [first, *row]


def _padded(
  tasks: Sequence[str], encode: Callable[[str], list[int]], length: int
) -> base.Prompt:
  """Rows of tokens, padded on the right."""
  token_NP = np.zeros((len(tasks), length), np.int32)
  mask_NP = np.zeros((len(tasks), length), np.int32)
  for i, task in enumerate(tasks):
    if not task.strip():
      raise ValueError(
        f'Task {i} has no text: give each a sentence that says what to do.'
      )
    row = encode(task)
    if len(row) > length:
      raise ValueError(
        f'The instruction {task!r} has {len(row)} tokens, and prompts have '
        f'{length} columns: raise `length`.'
      )
    token_NP[i, : len(row)] = row
    mask_NP[i, : len(row)] = 1
  return base.Prompt(token_NP, mask_NP)


def check_env(env: env_lib.Env, instruction: tuple[int, ...] | None):
  """Refuses an environment without instructions, where none is given.

  Raises:
    ValueError: for observations without `base.PROMPT`.
  """
  found = tree_paths.flatten(env.obs_spec)
  if instruction is None and not {*NAMES} <= {*found}:
    raise ValueError(
      f'The environment returns {[*found]}, and no instruction '
      f'({", ".join(NAMES)}): configure it to return one, or give the policy '
      'the tokens of one for all environments.'
    )


def from_observation(
  found: dict, instruction: tuple[int, ...] | None, rows: int
) -> base.Prompt:
  """The instruction of each row.

  Args:
    found: observations by path, with any leading dimensions.
    instruction: tokens of the same one for all; None for those of `found`.
    rows: the product of the leading dimensions.
  """
  if instruction is None:
    return base.Prompt(
      *(found[name].reshape(rows, found[name].shape[-1]) for name in NAMES)
    )
  token = jnp.broadcast_to(
    jnp.array(instruction, jnp.int32)[None], (rows, len(instruction))
  )
  return base.Prompt(token, jnp.ones_like(token))
