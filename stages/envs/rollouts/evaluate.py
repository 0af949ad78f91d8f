"""Initialization, export and evaluation for workflows in environments.

`init` and `policy_state` return trees of one structure, which
`stages.envs.rollouts.policy_file` writes and reads.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import stages
from stages import base, metrics
from stages.envs import env as env_lib
from stages.envs import episode_stats
from stages.envs.rollouts import obs_stats, rollout, video


def init(policy: base.Policy, env: env_lib.Env, normalize_obs: bool, key):
  """New parameters, and observation statistics if observations use them.

  Raises:
    ValueError: if they do, and the policy needs observations as they are.
  """
  if normalize_obs and policy.needs_raw_obs:
    raise ValueError(
      "The policy reads the state in the environment's units, which it "
      'normalizes by statistics of its own, and the workflow normalizes '
      'observations before: set normalize_obs = False.'
    )
  stats = obs_stats.init(env.obs_spec) if normalize_obs else ()
  return {'policy': policy.init(key), 'obs_stats': stats}


def policy_state(state) -> dict[str, Any]:
  """The policy in a workflow's state: parameters and observation statistics."""
  return {'policy': state.actor.params, 'obs_stats': state.obs_stats}


def evaluator(policy: base.Policy, env: env_lib.Env) -> Callable:
  """Returns `params, obs_stats, seed_B, key -> info`.

  It runs one greedy episode per seed. `info` holds the statistics of these
  episodes, their success by task where there are several, the number of those
  that a simulator lost, which are in no other, and, where the environment
  renders, a video of some of them.

  Raises:
    ValueError: by `evaluate`, if some tasks would have more seeds than others
      where `env.equal_rows` asks for as many.
  """
  reset = rollout.reset(video.with_recorder(env), with_task=bool(env.tasks))
  attempt = rollout.rollout(
    policy,
    env,
    env.horizon,
    greedy=True,
    keep_states=env.render is not None,
    keep_final_obs=False,
  )
  record = video.video_stage(env)
  score = stages.Stage(functools.partial(_score, env.tasks), 'score', 'sum')

  def evaluate(params, stats, seed_B, key):
    if seed_B.shape[0] % env.equal_rows:
      raise ValueError(
        f'The {seed_B.shape[0]} seeds of a held-out batch cannot be shared '
        f'equally by {len(env.tasks)} tasks in groups of '
        f'{env.task_group_size}: make held_out_batch (of seed_source.seeds) a '
        f'multiple of {env.equal_rows}, or bind '
        'equal_tasks = False.'
      )
    env_state, obs, *task = reset(seed_B)
    keys = stages.keys(key, seed_B)
    env_state, _, _, timestep = attempt(params, stats, env_state, obs, keys)
    info = score(timestep._replace(final_state=None), *task)
    return info | record(env_state, seed_B, timestep)

  return evaluate


def _score(
  tasks: Sequence[str], timestep: env_lib.TimeStep, task_B=None
) -> base.Info:
  """Statistics of each row's first episode, and the success in each task."""
  first = episode_stats.first_episode(timestep)
  info = episode_stats.metrics(first, 'eval')
  for i, name in enumerate(tasks):
    mask_B = (task_B == i) * first.count
    info[f'eval/{name}/success_once'] = metrics.score(
      first.success_once, mask_B
    )
  if timestep.env_failed is None:
    return info
  failed_BT = episode_stats.in_first_episode(timestep) * timestep.env_failed
  return info | {'eval/failed': failed_BT.max(1).sum()}
