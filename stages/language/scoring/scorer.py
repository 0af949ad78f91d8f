"""Scores of completions by a transformer: padded, or in packed rows."""

from collections.abc import Callable
import functools
from typing import Any

import jax.numpy as jnp

from stages.language.decoding import prefill, routing_replay
from stages.language.scoring import balance as balance_lib
from stages.language.scoring import packing
from stages.models import transformer
from stages.models.layers import mixture


def scorer(
  model: transformer.Transformer,
  score_states: Callable[..., Any],
  packed_tokens: int | None,
) -> Callable:
  """Returns `params, prompt, action, *, group_size=1, … -> scores`.

  With `balance=True`, `balance` of a `base.Evaluation` says how evenly experts
  were used. A mask, 1 on tokens whose scores are read, is needed for it
  and for packed rows. `routing`, a `routing_replay.Routing`, replays recorded
  experts.

  Args:
    model: the transformer.
    score_states: `params, x_BTD, action_BT -> scores`, of hidden states and the
      tokens that they predict: an array, or a tree of arrays.
    packed_tokens: tokens that a packed row has room for; completions are then
      read in packed rows, see `packing`, and scores are 0 where the
      mask is 0.
      None to read all completions together, padded to the longest possible.
  """

  def score_packed(balance: bool, params, rows: packing.PackedRows):
    x_MSD, routing = _states(
      model,
      params,
      *rows[:3],
      method='packed_states',
      balance=balance,
      expert=rows.expert,
    )
    scores = score_states(params, x_MSD, rows.action)
    if not balance:
      return scores, ()
    found = balance_lib.of_packed(routing, rows.segment)
    return scores._replace(balance=found.loss), found.load

  def score(
    params,
    prompt,
    action_BT,
    *,
    group_size=1,
    mask=None,
    balance=False,
    routing=None,
  ):
    _check_mask(mask, packed_tokens, balance)
    if packed_tokens is None:
      x_BTD, found = completion_states(
        model, params, prompt, action_BT, group_size, balance, routing
      )
      scores = score_states(params, x_BTD, action_BT)
      if not balance:
        return scores
      measured = balance_lib.of_padded(found, prompt, mask, group_size)
      return scores._replace(balance=measured)
    scores, load = packing.evaluate(
      functools.partial(score_packed, balance),
      params,
      prompt,
      action_BT,
      mask,
      routing,
      group_size=group_size,
      capacity=packed_tokens,
    )
    if not balance:
      return scores
    return scores._replace(balance=balance_lib.Balance(scores.balance, load))

  return score


def _check_mask(mask, packed_tokens: int | None, balance: bool):
  """Refuses to score without a mask where one is needed."""
  if mask is None and (balance or packed_tokens is not None):
    raise ValueError(
      f'Completions are packed (packed_tokens={packed_tokens}) or their '
      f'balance of experts is measured (balance={balance}), and no mask says '
      'which of their values are read: give one, as policy_stages.score '
      'does, or set packed_tokens (PACKED in gin) to None.'
    )


def completion_states(
  model,
  params,
  prompt,
  action_BT,
  group_size: int,
  balance: bool,
  routing: routing_replay.Routing | None,
):
  """Hidden states [B, T, D] that predict the tokens of completions.

  With `balance`, also the routing of each layer at all positions of groups.
  """
  expert = None
  if routing is not None:
    expert = routing_replay.padded(routing, group_size)
  split = prefill.split_prompt(prompt, group_size)
  token_BT = jnp.concatenate(
    [split.token_B[:, None], action_BT[:, :-1]], axis=1
  )
  return _states(
    model,
    params,
    split.prompt_NP,
    split.mask_NP,
    token_BT,
    split.position_B,
    split.pictures,
    method='hidden_states',
    balance=balance,
    expert=expert,
  )


def _states(
  model, params, *args, method: str, balance: bool, expert: Any
) -> tuple[Any, mixture.Routing | None]:
  """Hidden states, and the routing of each layer if it is asked for.

  `expert` are recorded experts of each position; None for those of the router.
  """
  variables = {'params': params}
  if expert is not None:
    variables |= routing_replay.by_layer(expert)
  apply = functools.partial(model.apply, variables, *args, method=method)
  if not balance:
    return apply(), None
  states, left = apply(mutable=[mixture.ROUTING])
  return states, left[mixture.ROUTING]['layers'][mixture.ROUTING]
