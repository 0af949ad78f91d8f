"""Batches of environments, and what their steps return."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float


class TimeStep(NamedTuple):
  """Result of one environment step, or of one chunk of actions.

  An episode that ends is reset at once (same-step autoreset in Gymnasium's
  words), so the next observation and the final one are two fields.

  Attributes:
    obs: observation to act on next: after the reset, if an episode ended.
    reward: reward of the action; of a chunk, Σₖ γᵏ rₖ over the steps executed.
    terminated: 1 where the episode ended in a terminal state: no bootstrapping.
    truncated: 1 where a time limit ended the episode: bootstrap from
      `final_obs`.
    final_obs: observation before any reset; equals `obs` where none happened.
    success: 1 where the task is solved at this moment; after the last step of
      a chunk.
    steps: environment steps executed of a chunk; None where an action is one
      step.
    env_failed: 1 where the simulator failed (crash, exception, NaN, time-out):
      the step is truncated, has no reward, and is not learned from. None where
      no step can fail.
    action_reward: rₖ of each action of a chunk, 0 of those not executed; None
      where an action is one step.
    chunk_success: 1 where the task was solved after any of these steps; None
      likewise.
    final_state: state before any reset; None where `Env.render` is.
  """

  obs: Any
  reward: Float[Array, ' B']
  terminated: Float[Array, ' B']
  truncated: Float[Array, ' B']
  final_obs: Any
  success: Float[Array, ' B']
  steps: Float[Array, ' B'] | None = None
  env_failed: Float[Array, ' B'] | None = None
  action_reward: Float[Array, 'B Z'] | None = None
  chunk_success: Float[Array, ' B'] | None = None
  final_state: Any = None


class Env(NamedTuple):
  """A batch of environments.

  Attributes:
    init: `seed_B -> state, obs`: starts one episode per seed. Everything random
      in an environment follows from its seed and from the actions taken in it,
      however the batch is cut or placed.
    step: `state, env_action -> state, TimeStep`. Consumes the state, whose
      leaves have rows. The state of a simulator is a token, int32 [B, 3]
      (environment, call count, seed), which stands for the state inside the
      simulator.
    obs_spec: shapes of one environment's observation, a tree of
      `jax.ShapeDtypeStruct`.
    action_low: lower bound of each action dimension.
    action_high: upper bound of each action dimension.
    horizon: maximum steps of an episode.
    action_choices: number of choices of each action dimension where actions are
      discrete; `step` then takes their indices, 0 … n − 1, as floats. Empty for
      continuous actions.
    host: whether it is a simulator on NumPy arrays rather than JAX. Its time
      steps have every field but `final_state`.
    render: `state, size=… -> frame_B`, uint8 [B, size, size, 3]: renders states
      for people; None where a state does not determine a picture.
    recorder: a `rollouts.video.VideoRecorder`; None of what it cannot render.
    send: `token, env_action -> Deferred` of what `step` returns; None where a
      simulator cannot step in the background.
    snapshot_spec: shapes of what `save` returns for one environment; None where
      the state is complete by itself, or a simulator cannot be saved.
    save: `token -> snapshot`: data from which another process can restore the
      environments.
    load: `token, snapshot -> token`: restores the environments.
    lockstep: whether a batch is never cut, as its simulators step together.
    tasks: names of the tasks of its environments, where there are several.
      Evaluations then report the success in each.
    task: `state -> task_B`: the number of each environment's task in `tasks`,
      int32 [B]; the state of a simulator is its token. None without `tasks`.
    task_group_size: adjacent environments that have one of `tasks`; 0 where
      the seed of an episode decides, which groups of episodes share.
    equal_rows: the rows of an evaluation are a multiple of it; others are
      refused, as some of `tasks` would have more of them.
  """

  init: Callable[[Any], tuple[Any, Any]]
  step: Callable[[Any, Any], tuple[Any, TimeStep]]
  obs_spec: Any
  action_low: tuple[float, ...]
  action_high: tuple[float, ...]
  horizon: int
  action_choices: tuple[int, ...] = ()
  host: bool = False
  render: Callable[..., Any] | None = None
  recorder: Any | None = None
  send: Callable[[Any, Any], Any] | None = None
  snapshot_spec: Any = None
  save: Callable[[Any], Any] | None = None
  load: Callable[[Any, Any], Any] | None = None
  lockstep: bool = False
  tasks: tuple[str, ...] = ()
  task: Callable[[Any], Any] | None = None
  task_group_size: int = 1
  equal_rows: int = 1
