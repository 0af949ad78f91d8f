"""Rematerialization: which activations a backward pass computes again.

A backward pass reads activations of the forward pass. A policy of
`jax.checkpoint_policies` says which of them are stored; the others are computed
again, which costs arithmetic and saves memory. No policy changes a result,
except by rounding.

A model that is built with `AUTO` reads the policy here while it is traced. So
it is a choice of the plan, for each stage that differentiates a model.
"""

from collections.abc import Callable
import contextvars
import functools

import jax

AUTO = 'auto'
NONE = 'none'  # Stores all activations.

# The policies that a search chooses from: all activations are stored, or those
# that products of a matrix and a batch of tokens compute, or none.
POLICIES = (NONE, 'dots_with_no_batch_dims_saveable', 'nothing_saveable')


class _Choice:
  """The policy of a stage that is being traced, and whether a model read it."""

  def __init__(self, policy: str):
    self.policy, self.was_read = policy, False


_choice = contextvars.ContextVar('remat', default=None)


def check(policy: str):
  """Raises ValueError if JAX has no such policy."""
  if policy != NONE and not hasattr(jax.checkpoint_policies, policy):
    raise ValueError(
      f"remat {policy!r} is neither 'none' nor a policy of "
      'jax.checkpoint_policies, such as '
      f'{" or ".join(map(repr, POLICIES[1:]))}.'
    )


def resolve(setting: str) -> str:
  """Returns the policy of a model's setting: that of the plan for `AUTO`."""
  if setting != AUTO:
    return setting
  choice = _choice.get()
  if choice is None:
    return NONE
  choice.was_read = True
  return choice.policy


def policy(setting: str) -> Callable | None:
  """The function of `jax.checkpoint_policies`; None if all are stored."""
  name = resolve(setting)
  return None if name == NONE else getattr(jax.checkpoint_policies, name)


def applied(fn: Callable, policy: str, readers: set[str]) -> Callable:
  """Returns `fn` for tracing, whose models with `AUTO` have a policy.

  Args:
    fn: a function that JAX can trace.
    policy: as in `check`.
    readers: the policy is added if a model reads it.
  """

  @functools.wraps(fn)
  def run(*args):
    choice = _Choice(policy)
    token = _choice.set(choice)
    try:
      return fn(*args)
    finally:
      _choice.reset(token)
      if choice.was_read:
        readers.add(policy)

  return run
