"""The stages in which a policy acts, and in which its trainer looks at that."""

from collections.abc import Callable

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
  """Returns `Version, experience -> experience`, as its trainer sees it.

  Where an engine outside JAX acted, the trainer goes over what it did by the
  parameters that it had: what the loss is clipped around, and what tells how
  far the two are apart. So it does where `several` versions acted, by the
  newest (decoupled PPO, arXiv:2505.24298). Else that is known, and costs
  nothing.
  """
  if policy.out_shapes is None and not several:
    return lambda actor, x: x
  rescore = logp(policy, 'proximal_logp', group_size)

  def look(actor: base.Version, x: base.Experience):
    return x._replace(proximal=rescore(actor.params, x.obs, x.action))

  return look
