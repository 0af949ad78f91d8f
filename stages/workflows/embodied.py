"""What workflows in worlds share: how they are judged."""

from collections.abc import Callable

from stages import base, rollout, tally
from stages import stage as stages


def examine(policy: base.Policy, world: base.World) -> Callable:
  """Returns `params, scale, seed_B, key -> info`: each seed's first episode."""
  reset = rollout.reset(world)
  attempt = rollout.rollout(policy, world, world.horizon, greedy=True)
  score = stages.Stage(
    lambda outcome: tally.told(tally.first(outcome), 'eval'), 'score', 'sum'
  )

  def evaluate(params, scale, seed_B, key):
    state, obs = reset(seed_B)
    keys = stages.keys(key, seed_B)
    *_, outcome = attempt(params, scale, state, obs, keys)
    return score(outcome)

  return evaluate
