"""What workflows in worlds share: what they export, and how they are judged."""

from collections.abc import Callable
from typing import Any

import stages
from stages import base
from stages.envs import episode_stats, obs_stats, rollout, video


def fresh(policy: base.Policy, world: base.Env, normalized: bool, key):
  """A policy that knows nothing, and the scale before anything was seen."""
  scale = obs_stats.nothing(world.obs) if normalized else ()
  return {'policy': policy.init(key), 'obs_stats': scale}


def exported(state) -> dict[str, Any]:
  """The policy of a state, as `stages.models.saved` keeps it."""
  return {'policy': state.actor.params, 'obs_stats': state.obs_stats}


def examine(policy: base.Policy, world: base.Env) -> Callable:
  """Returns `params, scale, seed_B, key -> info`: each seed's first episode.

  Where the world can be drawn, some of them can be seen.
  """
  reset = rollout.reset(video.filmed(world))
  attempt = rollout.rollout(
    policy, world, world.horizon, greedy=True, drawn=world.draw is not None
  )
  watch = video.watch(world)
  score = stages.Stage(
    lambda outcome: episode_stats.told(episode_stats.first(outcome), 'eval'),
    'score',
    'sum',
  )

  def evaluate(params, scale, seed_B, key):
    state, obs = reset(seed_B)
    keys = stages.keys(key, seed_B)
    state, _, _, outcome = attempt(params, scale, state, obs, keys)
    info = score(outcome._replace(final_state=None))
    return info | watch(state, seed_B, outcome._replace(final_obs=()))

  return evaluate
