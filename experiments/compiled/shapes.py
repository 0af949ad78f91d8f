"""A task without text: enough to plan and compile for a model's config.json.

Neither weights nor a tokenizer are needed, as only shapes matter.
"""

import jax
import jax.numpy as jnp
import numpy as np

import stages
from stages import base


def problems(*, batch_size: int, prompt_length: int) -> base.Source:
  """A source of prompts of one repeated token.

  Args:
    batch_size: problems a batch.
    prompt_length: tokens of a prompt.
  """
  token_BP = np.ones((batch_size, prompt_length), np.int32)
  prompt = base.Prompt(token_BP, token_BP)
  batch = base.Problem(prompt, np.zeros(batch_size, np.int32))
  return base.Source(
    init=lambda seed: {'seed': np.array(seed)},
    next=lambda state, metrics: (state, batch),
    held_out=lambda: [batch],
  )


def verify() -> stages.Stage:
  """A stage `answer, action, mask -> Verdict` on the host, for its shapes."""

  def never_right(answer_B, action_BT, mask_BT) -> base.Verdict:
    del answer_B, mask_BT
    wrong_B = np.zeros(len(action_BT), np.float32)
    return base.Verdict(wrong_B, wrong_B)

  def out_shapes(answer, action, mask):
    del answer, mask
    row = jax.ShapeDtypeStruct(action.shape[:1], jnp.float32)
    return base.Verdict(row, row)

  return stages.Stage(never_right, 'reward', host=True, out_shapes=out_shapes)
