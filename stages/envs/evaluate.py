"""What workflows in worlds share: what they export, and how they are judged."""

from collections.abc import Callable
from typing import Any

import stages
from stages import base
from stages.envs import episode_stats, obs_stats, rollout, video


def init(policy: base.Policy, world: base.Env, normalize_obs: bool, key):
  """A policy that knows nothing, and the scale before anything was seen."""
  scale = obs_stats.init(world.obs_spec) if normalize_obs else ()
  return {'policy': policy.init(key), 'obs_stats': scale}


def policy_state(state) -> dict[str, Any]:
  """The policy of a state, as `stages.models.policy_file` keeps it."""
  return {'policy': state.actor.params, 'obs_stats': state.obs_stats}


def evaluator(policy: base.Policy, world: base.Env) -> Callable:
  """Returns `params, scale, seed_B, key -> info`: each seed's first episode.

  Where the world can be drawn, some of them can be seen.
  """
  reset = rollout.reset(video.with_recorder(world))
  attempt = rollout.rollout(
    policy,
    world,
    world.horizon,
    greedy=True,
    keep_states=world.render is not None,
  )
  watch = video.video_stage(world)
  score = stages.Stage(
    lambda timestep: episode_stats.metrics(
      episode_stats.first_episode(timestep), 'eval'
    ),
    'score',
    'sum',
  )

  def evaluate(params, scale, seed_B, key):
    state, obs = reset(seed_B)
    keys = stages.keys(key, seed_B)
    state, _, _, timestep = attempt(params, scale, state, obs, keys)
    info = score(timestep._replace(final_state=None))
    return info | watch(state, seed_B, timestep._replace(final_obs=()))

  return evaluate
