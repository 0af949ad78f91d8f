"""Scores of completions by a transformer: padded, or in packed rows."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from stages.language import packing
from stages.language.decoding import prefill
from stages.models import transformer


def scorer(
  model: transformer.Transformer,
  score_states: Callable[..., Any],
  packed_tokens: int | None,
) -> Callable:
  """Returns `params, prompt, action, *, group_size=1, mask=None -> scores`.

  Args:
    model: the transformer.
    score_states: `params, x_BTD, action_BT -> scores`, of hidden states and the
      tokens that they predict: an array, or a tree of arrays.
    packed_tokens: tokens that a packed row has room for; completions are then
      read in packed rows, see `packing`, and `mask` is needed: 1 where scores
      are read, which are 0 elsewhere. None to read all completions together,
      padded to the longest possible.
  """

  def score_packed(params, rows: packing.PackedRows):
    x_MSD = model.apply({'params': params}, *rows[:3], method='packed_states')
    return score_states(params, x_MSD, rows.action)

  def score(params, prompt, action_BT, *, group_size=1, mask=None):
    if packed_tokens is None:
      x_BTD = completion_states(model, params, prompt, action_BT, group_size)
      return score_states(params, x_BTD, action_BT)
    if mask is None:
      raise ValueError(
        f'Completions are packed (packed_tokens={packed_tokens}), and no mask '
        'says which of their values are read: give one, as '
        'policy_stages.score does, or set packed_tokens (PACKED in gin) to '
        'None.'
      )
    return packing.evaluate(
      score_packed,
      params,
      prompt,
      action_BT,
      mask,
      group_size=group_size,
      capacity=packed_tokens,
    )

  return score


def completion_states(model, params, prompt, action_BT, group_size: int):
  """Hidden states [B, T, D] that predict the tokens of completions."""
  split = prefill.split_prompt(prompt, group_size)
  token_BT = jnp.concatenate(
    [split.token_B[:, None], action_BT[:, :-1]], axis=1
  )
  return model.apply(
    {'params': params},
    split.prompt_NP,
    split.mask_NP,
    token_BT,
    split.position_B,
    method='hidden_states',
  )
