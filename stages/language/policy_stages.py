"""The stages in which a policy acts, and in which its trainer looks at that."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

import stages
from stages import base


def act(
  policy: base.Policy, name: str, *, group_size: int = 1, greedy: bool = False
) -> stages.Stage:
  """Returns `Version, obs, keys -> Experience`, every token with its version.

  Args:
    policy: who acts: on the host, if an engine outside JAX does.
    name: of the stage.
    group_size: adjacent rows that share their observation.
    greedy: take the likeliest action instead of a draw.
  """

  host = policy.out_shapes is not None

  def run(actor: base.Version, obs, key_B):
    def versioned(x: base.Experience):
      return x._replace(version=jnp.broadcast_to(actor.step, x.mask.shape))

    x = policy.act(
      actor.params, obs, key_B, group_size=group_size, greedy=greedy
    )
    return stages.Deferred(x, versioned) if host else versioned(x)

  def like(actor: base.Version, obs, key_B):
    x = policy.out_shapes(actor.params, obs, key_B)
    version = jax.ShapeDtypeStruct(x.mask.shape, actor.step.dtype)
    return x._replace(version=version)

  if not host:
    return stages.Stage(run, name, unbatched=(0,), group_size=group_size)
  return stages.Stage(
    run,
    name,
    unbatched=(0,),
    group_size=group_size,
    host=True,
    out_shapes=like,
    asynchronous=True,
  )


def logp(policy: base.Policy, name: str, group_size: int) -> stages.Stage:
  """Returns `params, obs, action -> logp`, as a forward pass has it."""

  def run(params, obs, action_BT):
    return policy.evaluate(params, obs, action_BT, group_size=group_size).logp

  return stages.Stage(run, name, unbatched=(0,), group_size=group_size)


def proximal_logp(
  policy: base.Policy, group_size: int, several: bool = False
) -> Callable:
  """Returns `Version, experience -> experience`, with `proximal` where needed.

  Where an engine outside JAX sampled, the trainer computes log-probabilities
  of its tokens by the same parameters: the loss is clipped around those, and
  they tell how far engine and trainer differ. So it does, by the newest
  parameters, where `several` versions sampled (decoupled PPO,
  arXiv:2505.24298). Elsewhere they are already known.
  """
  if policy.out_shapes is None and not several:
    return lambda actor, x: x
  rescore = logp(policy, 'proximal_logp', group_size)

  def with_proximal(actor: base.Version, x: base.Experience):
    return x._replace(proximal=rescore(actor.params, x.obs, x.action))

  return with_proximal


def repeat(group_size: int) -> stages.Stage:
  """Returns a stage that repeats each problem for the rows of its group."""

  def run(problem: base.Problem):
    return jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), problem)

  return stages.Stage(run, 'repeat', 'batch')


class Rollouts(NamedTuple):
  """How completions are generated.

  Attributes:
    run: `Version, carry, problem, keys -> problem, experience, carry, info`.
      What it returns is of the rows that are completed: their problems, their
      experience, what is carried to the next step, and metrics.
    allocate: `problem -> carry` of the first step; None if nothing is carried.
  """

  run: Callable
  allocate: Callable | None = None


def complete(policy: base.Policy, group_size: int) -> Rollouts:
  """Every step completes the prompts that it is given."""
  generate = act(policy, 'generate', group_size=group_size)
  with_proximal = proximal_logp(policy, group_size)

  def run(actor: base.Version, carry, problem: base.Problem, keys):
    x = generate(actor, problem.prompt, keys)
    return problem, with_proximal(actor, x), carry, {}

  return Rollouts(run)
