"""Problems and workflows that tests of GRPO share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import stages
from stages import base, workflows
from stages.learn import optimizers
import tiny


@functools.partial(
  stages.Stage,
  name='reward',
  host=True,
  out_shapes=lambda answer, action, mask: base.Verdict(
    *[jax.ShapeDtypeStruct(action.shape[:1], jnp.float32)] * 2
  ),
)
def count_even(answer, action, mask):
  """The share of even tokens, times the answer: 0 rewards nothing."""
  share = ((action % 2 == 0) * mask).sum(1) / np.maximum(mask.sum(1), 1)
  reward = (share * answer).astype(np.float32)
  return base.Verdict(reward, (share == 1).astype(np.float32))


@functools.cache
def grpo(optimizer=None, **kwargs):
  optimizer = optimizer or optimizers.adamw(1e-2)
  return workflows.grpo(
    tiny.policy(length=4), count_even, optimizer, group_size=8, **kwargs
  )
