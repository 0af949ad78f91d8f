"""Completions of vLLM as arrays."""

from collections.abc import Sequence

import numpy as np

from rlinf_jax.engines import vllm_request
from stages import base


def tokens(completions: base.Completions, i: int) -> list[int]:
  """The tokens of row `i`."""
  return completions.action[i, completions.mask[i] > 0].tolist()


def extended(
  completions: base.Completions,
  rows,
  new: Sequence[vllm_request.Completion | None],
) -> base.Completions:
  """Completions with the tokens `new`, if there are some, put behind `rows`."""
  action, logp, mask, alive = map(np.array, completions)
  for i, row in zip(rows, new, strict=True):
    if row is None:
      continue
    n = int(mask[i].sum())
    here = slice(n, n + len(row.token))
    action[i, here], logp[i, here], mask[i, here] = row.token, row.logp, 1
    alive[i] = not row.ended
  return base.Completions(action, logp, mask, alive)


def experience(
  prompt, completions: Sequence[vllm_request.Completion], T: int
) -> base.Experience:
  """Completions as arrays with T columns, zero after the end of a row."""
  B = len(completions)
  action_BT = np.zeros((B, T), np.int32)
  logp_BT, mask_BT = np.zeros((2, B, T), np.float32)
  for i, row in enumerate(completions):
    n = len(row.token)
    action_BT[i, :n], logp_BT[i, :n], mask_BT[i, :n] = row.token, row.logp, 1
  truncated_B = np.array([not row.ended for row in completions], np.float32)
  return base.Experience(prompt, action_BT, logp_BT, mask_BT, truncated_B)
