"""The nouns. Arrays live in NamedTuples; behaviour lives in functions.

Array names end in their dimensions, one capital letter each:

  B row    N group    G row within a group    M row of a minibatch
  P prompt token    T completion token or step    C token that may be looked at
  S position in a group: its prompt, then its completions end to end
  V vocabulary    D model width    H head    K key-value head    W head width
  J head among those of a key-value head    Q query among those of its keys
  F feed-forward width, or channels of a picture's layer    L layer
  R half a head width: a rotated plane
  O feature of an observation    A dimension of an action    X axis of the plane
  Z step of a chunk of actions    Y row of a replay    I critic among several
  U pixel of a window, along one of its edges
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Int

Params = Any  # A tree of arrays.
Key = jax.Array  # A scalar, or one a row.
Info = dict[str, Any]  # Metrics by name, each a monoid of `stages.metrics`.


class Prompt(NamedTuple):
  """Tokens to continue, padded on the left or on the right.

  Attributes:
    token: token ids; anything where `mask` is zero.
    mask: one on real tokens, of which every row has at least one.
  """

  token: Int[Array, 'B P']
  mask: Int[Array, 'B P']


class Problem(NamedTuple):
  """A batch of prompts and whatever a verifier needs to judge their answers.

  Attributes:
    prompt: the questions.
    answer: a tree of arrays whose first dimension is the row.
  """

  prompt: Prompt
  answer: Any


class Example(NamedTuple):
  """A batch of prompts with completions worth imitating.

  Attributes:
    prompt: the questions.
    action: the completions, token by token, the end token included.
    mask: one on real tokens of `action`.
  """

  prompt: Prompt
  action: Int[Array, 'B T']
  mask: Float[Array, 'B T']


class Demonstration(NamedTuple):
  """Steps of somebody who can, worth imitating.

  Attributes:
    obs: what was seen before each.
    action: what was done, on the scale of a policy's actions: −1 … 1 is the
      range that the world has for them.
  """

  obs: Float[Array, 'B O']
  action: Float[Array, 'B A']


class Experience(NamedTuple):
  """What a policy did, and what came of it.

  A token is an action whose observation is its prefix: there, `obs` is where
  the row began, and the actions before a step complete it. In a world, `obs` is
  what was seen before each action; a row may hold several episodes, one after
  the other, and a single step has no T.

  Attributes:
    obs: what the policy saw before its first action, or before each.
    action: what it did: tokens, or vectors [B, T, A].
    logp: log-probability it gave to `action` when it acted, of the very
      distribution that it sampled from.
    mask: one where `action` was its own; zero after the end.
    truncated: one where a limit of length ended the row, not the policy; in a
      world, [B, T].
    version: updates that the parameters had seen which drew each action.
    advantage: how much better than expected.
    reward: what each action was followed by.
    value: the critic's estimate before each action.
    next_value: its estimate after it, before anything begins anew.
    discount: γ, zero only where the episode terminates here.
    continue_: zero where the episode ends here, in either way.
    return_: what the critic shall learn: advantage (before any whitening) and
      value.
    proximal: log-probability that its trainer gives to `action` by the same
      parameters, where an engine acted whose arithmetic is another, or by the
      newest of several that acted; None where `logp` is that.
    arrival: by which rows are in the order in which they ended, in any unit;
      None where all were begun at once and `mask` tells.
  """

  obs: Any
  action: Any
  logp: Float[Array, 'B T']
  mask: Float[Array, 'B T']
  truncated: Float[Array, '...']
  version: Int[Array, 'B T'] | None = None
  advantage: Float[Array, 'B T'] | None = None
  reward: Float[Array, 'B T'] | None = None
  value: Float[Array, 'B T'] | None = None
  next_value: Float[Array, 'B T'] | None = None
  discount: Float[Array, 'B T'] | None = None
  continue_: Float[Array, 'B T'] | None = None
  return_: Float[Array, 'B T'] | None = None
  proximal: Float[Array, 'B T'] | None = None
  arrival: Int[Array, ' B'] | None = None


class Draft(NamedTuple):
  """Completions as far as they are.

  Attributes:
    action: tokens; zero where there are none yet.
    logp: their log-probabilities, as of when each was drawn.
    mask: one where there is a token: from the first on, without a gap.
    alive: rows that have not drawn a token that ends them.
  """

  action: Int[Array, 'B T']
  logp: Float[Array, 'B T']
  mask: Float[Array, 'B T']
  alive: Bool[Array, ' B']


class Verdict(NamedTuple):
  """What a verifier makes of completions.

  Attributes:
    reward: what the policy learns from.
    correct: one where the answer is right, before any shaping of the reward.
  """

  reward: Float[Array, ' B']
  correct: Float[Array, ' B']


class Evaluation(NamedTuple):
  """What a policy thinks of actions already taken.

  Attributes:
    logp: log-probability of each action.
    entropy: of the distribution each action is drawn from, in nats.
    value: of what was seen before each action, if the policy has a critic.
  """

  logp: Float[Array, 'B T']
  entropy: Float[Array, 'B T']
  value: Float[Array, 'B T'] | None = None


class Version(NamedTuple):
  """Parameters, and how many updates they have seen."""

  params: Params
  step: Int[Array, '']


class TrainState(NamedTuple):
  """Everything an update reads and rewrites."""

  params: Params
  opt_state: Any
  step: Int[Array, '']


class Policy(NamedTuple):
  """A trainable map from observations to actions, as pure functions.

  Attributes:
    init: `key -> params`.
    act: `params, obs, keys, *, group_size=1, greedy=False -> Experience`, one
      key a row. Rows come in groups of `group_size` that share their
      observation, next to each other, so that it need be read only once.
      `greedy` takes the likeliest action instead of a draw. A language model
      acts until its rows end, a robot once.
    evaluate: `params, obs, action, *, group_size=1 -> Evaluation`.
    command: `action -> command`: what a world is told to do, within its bounds;
      None where actions are meant as they are.
    value: `params, obs -> value`, the critic alone; None without one.
    out_shapes: `params, obs, keys -> Experience` of shapes, where `act` runs
      outside JAX, on an engine that computes log-probabilities in its own way,
      and returns a `stage.Deferred` of its experience; None where both are one.
    resume: `params, obs, keys, draft, *, group_size=1, begun=0, go_on ->
      Draft`: goes on with completions, as `stages.generate.resume` says; with
      `out_shapes` it takes keys as their bits and returns a `stage.Deferred`;
      None for what cannot.
  """

  init: Callable[[Key], Params]
  act: Callable[..., Experience]
  evaluate: Callable[..., Evaluation]
  command: Callable[[Any], Any] | None = None
  value: Callable[..., Any] | None = None
  out_shapes: Callable[..., Experience] | None = None
  resume: Callable[..., Draft] | None = None


class TimeStep(NamedTuple):
  """What came of an action, or of a chunk of them.

  An episode that ends begins anew at once, so two observations are told apart.

  Attributes:
    obs: what is seen now, after the next episode has begun if one ended.
    reward: of the action; of a chunk, Σₖ γᵏ rₖ over the steps that were made.
    terminated: one where the episode ended for good: nothing comes after.
    truncated: one where a limit of time ended it: more would have come.
    final_obs: what was seen before anything began anew; else the same as `obs`.
    success: one where the task is solved at this moment.
    steps: how many of a chunk were made before the episode ended; None where
      an action is one step.
    lost: one where the simulator failed instead of making the step (crash,
      exception, NaN, hang): truncated, without reward, `final_obs` what was
      last seen: it shall not count. None where nothing can fail.
    final_state: the state before anything began anew, as `Env.draw` takes it;
      None where nothing can be drawn by it.
  """

  obs: Any
  reward: Float[Array, ' B']
  terminated: Float[Array, ' B']
  truncated: Float[Array, ' B']
  final_obs: Any
  success: Float[Array, ' B']
  steps: Float[Array, ' B'] | None = None
  lost: Float[Array, ' B'] | None = None
  final_state: Any = None


class Camera(NamedTuple):
  """Films a simulator, of which there is no picture but while it is there.

  Attributes:
    begin: `seed_B, rows=…, every=… -> state, obs`: as `Env.init`, and films
      the first episode of each of the first `rows` environments: as it begins,
      after every so many steps, and as it ends.
    film: `state, time -> frame, shown_B`: pictures of environments after so
      many steps, int32 [B, n]: uint8 [B, n, *shape], and one where there are
      all of them.
    shape: of a picture, height, width and three colours.
  """

  begin: Callable[..., tuple[Any, Any]]
  film: Callable[[Any, Any], tuple[Any, Any]]
  shape: tuple[int, int, int]


class Env(NamedTuple):
  """A batch of environments to act in.

  Attributes:
    init: `seed_B -> state, obs`: begins as many episodes as there are seeds.
      All that happens in an environment follows from its seed and from what is
      done there, however environments are cut, placed or spread.
    step: `state, command -> state, TimeStep`. The state is used up; its leaves
      have rows. That of a simulator is a token, int32 [B, 3] (environment,
      calls, seed): it stands for what only the simulator knows.
    obs: shapes of what is seen in one environment, a tree of
      `jax.ShapeDtypeStruct`.
    low: the least of each dimension of a command.
    high: the most.
    horizon: most steps of an episode.
    host: a simulator, on NumPy arrays, and not JAX. Its outcomes have all
      fields but `final_state`, as a token draws nothing.
    draw: `state, size=… -> frame_B`, uint8 [B, size, size, 3]: how it looks,
      for people; None where a state does not tell.
    camera: of a simulator that can be drawn.
    send: `token, command -> stage.Deferred` of what `step` returns; None where
      nothing can be done while a simulator steps.
    past: shapes of what `save` returns for one environment; None where a state
      is all that there is, or a simulator cannot be saved.
    save: `token -> past`, by which another process can bring environments to
      where they are.
    load: `token, past -> token`: has them there, wherever they were.
    whole: whether a simulator steps all environments at once or none.
  """

  init: Callable[[Any], tuple[Any, Any]]
  step: Callable[[Any, Any], tuple[Any, TimeStep]]
  obs: Any
  low: tuple[float, ...]
  high: tuple[float, ...]
  horizon: int
  host: bool = False
  draw: Callable[..., Any] | None = None
  camera: Camera | None = None
  send: Callable[[Any, Any], Any] | None = None
  past: Any = None
  save: Callable[[Any], Any] | None = None
  load: Callable[[Any, Any], Any] | None = None
  whole: bool = False


class Workflow(NamedTuple):
  """An algorithm: where it starts, what one step does, how it is judged.

  Attributes:
    init: `key -> state`.
    step: `state, batch, key -> state, info`. It only routes values between
      stages; arithmetic belongs inside a stage.
    evaluate: `state, batch, key -> info`: a second flow, which reads the state.
    params: `state -> params` of the policy that the workflow makes.
    staleness: steps that may be begun before an earlier one has ended, as what
      they read of the state is that much older.
    score: the metric of `evaluate` that says how good the policy is, of 1.
    begin: `state, batch -> state`: makes room in a new state for what steps of
      such batches leave unfinished; None where they leave nothing.
  """

  init: Callable[[Key], Any]
  step: Callable[[Any, Any, Key], tuple[Any, Info]]
  evaluate: Callable[[Any, Any, Key], Info]
  params: Callable[[Any], Params]
  staleness: int = 0
  score: str = 'eval/accuracy'
  begin: Callable[[Any, Any], Any] | None = None


class Source(NamedTuple):
  """Where batches come from. Its state is checkpointed with the rest.

  Attributes:
    init: `seed -> state`, a tree of NumPy arrays.
    next: `state, metrics -> state, batch`, where `metrics` are the numbers of
      the step before (empty at first), so that a source may be a curriculum.
    held_out: `() -> batches`, a list that no training batch overlaps.
    text: `token, mask -> texts` of rows, for people to read; None where rows
      are not text.
  """

  init: Callable[[int], Any]
  next: Callable[[Any, dict[str, float]], tuple[Any, Any]]
  held_out: Callable[[], list[Any]]
  text: Callable[[Any, Any], list[str]] | None = None
