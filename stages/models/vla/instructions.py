"""Instructions as tokens, in the published prompts of each family of models.

An encoder turns tasks, such as 'push the puck to the green disc', into a
`base.Prompt` with one row a task, padded on the right. Environments and
demonstrations put the row of an episode into its observations, under
`base.PROMPT`.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from stages import base, ranges, tree_paths
from stages.language import tokens
from stages.models.vla.openvla import openvla as openvla_lib

SPACE = '▁'  # A space of its own among Llama's tokens, 29871.
NAMES = tuple(f'{base.PROMPT}/{name}' for name in base.Prompt._fields)


def openvla(
  tasks: Sequence[str], *, checkpoint: str, length: ranges.PositiveInt = 48
) -> base.Prompt:
  """Prompts of OpenVLA and OpenVLA-OFT.

  The text is `openvla.prompt_text`. Its first token is the beginning of the
  text. The last one is a space of its own, if the tokenizer has such a token,
  as actions followed one in training.

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
    row = _begun(tokenizer, openvla_lib.prompt_text(task), checkpoint)
    return row if space in (None, row[-1]) else [*row, space]

  return _padded(tasks, encode, length)


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


def check(env: base.Env, prompt: tuple[int, ...] | None):
  """Refuses an environment without instructions, where none is given.

  Raises:
    ValueError: for observations without `base.PROMPT`.
  """
  found = tree_paths.flatten(env.obs_spec)
  if prompt is None and not {*NAMES} <= {*found}:
    raise ValueError(
      f'The environment returns {[*found]}, and no instruction '
      f'({", ".join(NAMES)}): configure it to return one, or give the policy '
      'the tokens of one for all environments.'
    )


def of_observation(
  found: dict, prompt: tuple[int, ...] | None, rows: int
) -> base.Prompt:
  """The instruction of each row.

  Args:
    found: observations by path, with any leading dimensions.
    prompt: tokens of the same instruction for all; None for those of `found`.
    rows: the product of the leading dimensions.
  """
  if prompt is None:
    return base.Prompt(
      *(found[name].reshape(rows, found[name].shape[-1]) for name in NAMES)
    )
  token = jnp.broadcast_to(
    jnp.array(prompt, jnp.int32)[None], (rows, len(prompt))
  )
  return base.Prompt(token, jnp.ones_like(token))
