"""Types that stages, workflows, policies and environments share.

Arrays live in NamedTuples; behavior lives in functions. The name of an array
ends in its dimensions, one capital letter each:

  B row    N group    G row within a group
  M row of a minibatch, slot, or packed row
  P prompt token    T completion token or time step    C key position
  S position in a packed group: its prompt, then its completions end to end; or
  in a packed row, which holds completions of several groups
  V vocabulary    D model width    H head    K key-value head    W head width
  J query head within a key-value head    Q query token
  F feed-forward width, or channels of a convolution    L layer
  R half a head width: one rotated plane
  O observation feature    A action dimension    X axis of the plane
  Z step of an action chunk    Y row of a replay buffer    I critic of an
  ensemble, or rank of an adapter    U pixel along an edge of a convolution
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Int

from stages import core

Params = Any  # A tree of arrays.
Key = jax.Array  # A scalar, or one a row.
Info = dict[str, Any]  # Metrics by name, each a type of `stages.metrics`.
CRITIC = 'critic'  # Key of a critic's parameters, see `Policy.init`.
FROZEN = 'frozen'  # Key of parameters that are not trained, likewise.
PROMPT = 'prompt'  # Key of an instruction in observations, a dict of a Prompt.


class Prompt(NamedTuple):
  """Prompt tokens, padded on the left or on the right.

  Attributes:
    token: token ids; padding may hold any id.
    mask: 1 on real tokens, 0 on padding. Every row has at least one token.
  """

  token: Int[Array, 'B P']
  mask: Int[Array, 'B P']


class Problem(NamedTuple):
  """A batch of prompts with the data that a verifier needs.

  Attributes:
    prompt: the questions.
    answer: a tree of arrays whose first dimension is the row, such as the
      expected answers.
    weight: 1 on problems that count in an evaluation, 0 on those that fill up
      a batch; None where all count.
  """

  prompt: Prompt
  answer: Any
  weight: Float[Array, ' B'] | None = None


class Example(NamedTuple):
  """A batch of prompts with reference completions, for supervised learning.

  Attributes:
    prompt: the questions.
    action: completion tokens, including the end token.
    mask: 1 on real tokens of `action`.
  """

  prompt: Prompt
  action: Int[Array, 'B T']
  mask: Float[Array, 'B T']


class Demonstration(NamedTuple):
  """Steps of an expert in an environment, for behavior cloning.

  Attributes:
    obs: observation before each step, [B, O], or a dict of parts [B, …].
    action: action taken, on the scale of a policy's actions: −1 … 1 covers the
      range that the environment accepts. With a chunk, it and those after it.
  """

  obs: Any
  action: Float[Array, 'B A'] | Float[Array, 'B Z A']


class Experience(NamedTuple):
  """A batch of trajectories: observations, actions, rewards and targets.

  For a language model, a token is an action, `obs` is the prompt, and the
  actions before a step complete the observation. In an environment, `obs` is
  the observation before each action; a row may hold several episodes one after
  the other, and a single step has no T dimension.

  Attributes:
    obs: observation before the first action (language), or before each.
    action: actions taken: tokens [B, T], or vectors [B, T, A].
    logp: log-probability of each action under the distribution that it was
      sampled from, at the time of sampling. In an environment, it may have more
      dimensions than steps, see `granularity`.
    mask: 1 where `action` is the policy's own; 0 on tokens of an environment
      between its turns, and after the end of a row.
    truncated: 1 where a limit of length ended the row [B], or a limit of time
      the episode of an environment [B, T].
    version: optimizer steps that the acting parameters had seen, per action.
    advantage: advantage estimate of each action. In an environment, it and what
      follows to `return_` are of each step, or of each action of its chunk.
    reward: reward that followed each action.
    value: critic's estimate of the return before each action.
    next_value: critic's estimate after each action, before any automatic reset.
    discount: γ, and 0 where the episode terminates at this step.
    continue_: 0 where the episode ends at this step, terminated or truncated.
    return_: target of the critic: advantage (before normalization) plus value.
    proximal: log-probability of each action as the trainer computes it with the
      parameters before the update (the proximal policy of arXiv:2505.24298).
      Set where `logp` has another rounding than the trainer's (an engine
      outside JAX, or arithmetic narrower than float32), or where older versions
      of the policy sampled; None where it equals `logp` to float32's rounding.
    arrival: rank by which rows finished; None where it follows from their
      lengths, as all started together.
    routing: a `language.decoding.routing_replay.Routing`; None unless it is
      replayed.
    env_failed: 1 where the environment of a conversation failed, whose row then
      has no reward and a mask of zeros; None where none can fail.
    steps: steps of the environment that each chunk of actions took; None where
      an action is one step.
  """

  obs: Any
  action: Any
  logp: Float[Array, 'B T ...']
  mask: Float[Array, 'B T']
  truncated: Float[Array, '...']
  version: Int[Array, 'B T'] | None = None
  advantage: Float[Array, 'B T ...'] | None = None
  reward: Float[Array, 'B T ...'] | None = None
  value: Float[Array, 'B T ...'] | None = None
  next_value: Float[Array, 'B T ...'] | None = None
  discount: Float[Array, 'B T ...'] | None = None
  continue_: Float[Array, 'B T ...'] | None = None
  return_: Float[Array, 'B T ...'] | None = None
  proximal: Float[Array, 'B T ...'] | None = None
  arrival: Int[Array, ' B'] | None = None
  routing: Any = None
  env_failed: Float[Array, ' B'] | None = None
  steps: Float[Array, 'B T'] | None = None


class Completions(NamedTuple):
  """Completions under way.

  Attributes:
    action: tokens drawn so far; 0 where none is drawn yet.
    logp: their log-probabilities at the time of sampling.
    mask: 1 on drawn tokens, a prefix of each row.
    alive: rows that have not drawn an end token.
  """

  action: Int[Array, 'B T']
  logp: Float[Array, 'B T']
  mask: Float[Array, 'B T']
  alive: Bool[Array, ' B']


class Turns(NamedTuple):
  """Rewards of the turns of conversations, and their states.

  Attributes:
    reward: reward of each turn.
    state: a number of the state that a turn was taken in; 0 in the first.
  """

  reward: Float[Array, 'B K']
  state: Int[Array, 'B K']


class Verdict(NamedTuple):
  """Result of verifying completions.

  Attributes:
    reward: reward to learn from, after any shaping.
    correct: 1 where the answer is right, before any shaping.
    terms: numbers to log, by name, such as the terms that `reward` adds up.
    vote: id of each completion's final answer, for majority votes; −1 where it
      has none. None where a verifier knows no final answers.
    turns: rewards by turn, before any shaping; None for one turn.
  """

  reward: Float[Array, ' B']
  correct: Float[Array, ' B']
  terms: Mapping[str, Float[Array, ' B']] | tuple[()] = ()
  vote: Int[Array, ' B'] | None = None
  turns: Turns | None = None


class Evaluation(NamedTuple):
  """A policy's assessment of given actions.

  Attributes:
    logp: log-probability of each action, in the shape of `Experience.logp`.
    entropy: entropy of the distribution of each, in nats.
    value: critic's estimate before each action, in the shape of
      `Experience.value`; None without a critic.
    balance: a `language.scoring.balance.Balance`; None unless it was asked for.
  """

  logp: Float[Array, 'B T ...']
  entropy: Float[Array, 'B T ...']
  value: Float[Array, 'B T ...'] | None = None
  balance: Any = None


class Version(NamedTuple):
  """Parameters and the number of optimizer steps they have seen."""

  params: Params
  step: Int[Array, '']


class TrainState(NamedTuple):
  """State of one optimizer: parameters, moments and step count."""

  params: Params
  opt_state: Any
  step: Int[Array, '']


class Policy(NamedTuple):
  """A trainable policy as pure functions.

  Attributes:
    init: `key -> params`. In a dict of parameters, the key `CRITIC` has those
      that only the critic uses, by which `optimizers.actor_critic` finds them,
      and `FROZEN` has those that are not trained, see `train_step`.
    act: `params, obs, keys, *, group_size=1, greedy=False -> Experience`.
      Samples actions, with one key a row. Adjacent rows in groups of
      `group_size` share their observation, so a prompt is encoded once a group.
      `greedy` takes the most likely action. A language model acts until all
      rows have ended; a control policy acts once.
    evaluate: `params, obs, action, *, group_size=1 -> Evaluation`. It also
      takes `mask`, the actions to evaluate, if `packed_tokens` is set;
      `balance`, if `trains_router` is; and the recorded routing, if
      `replays_routing` is, see `language.scoring.scorer`.
    to_env_action: `action -> env_action`: maps a sampled action into the
      environment's bounds; None where actions are used as they are.
    value: `params, obs -> value`, the critic alone; None without a critic. It
      returns one value a step, or one for each action of a step's chunk.
    out_shapes: `params, obs, keys -> Experience` of shapes. Set where `act`
      runs on an engine outside JAX, which computes log-probabilities in its own
      arithmetic and returns a `Deferred` of its experience; else None.
    resume: `params, obs, keys, completions, *, group_size=1, greedy=False,
      num_started=0, should_continue -> Completions`: continues completions, as
      does `stages.language.decoding.generate.resume`; None if the policy
      cannot. Without `out_shapes`, `resume` and `act` also take `sampling`.
      With `out_shapes`, `resume` takes keys or their bits and returns a
      `Deferred`. Rows that `should_continue` stops then have the tokens drawn
      so far; with `in_background`, they are returned unchanged, and the engine
      goes on with them for a later call. With `out_shapes`, `resume` and `act`
      also take a `temperature`, in place of that of `sampling`, and `resume` of
      one row takes `heard`, a function that is called with new tokens and their
      log-probabilities.
    empty_cache: `rows -> cache`, an empty cache for `resume`, which then also
      takes `cache` and `max_unread`, and also returns the cache; None if it has
      none, as in slots.
    empty_kept: `rows -> kept`, in slots: room for keys and values of `rows`
      unfinished rows, with none in it. With `kept` of the leading `num_started`
      rows, `resume` reads again only the rows that are not in it. It then
      returns completions and `row_N -> kept`, which selects what is kept of
      some rows for the next call. None if the policy keeps nothing.
    engine: what the cost model reads of continuous batching; None without it.
    sampling: the distribution that `act` samples from and `evaluate` scores
      under, see `stages.language.sample`; None where there is no choice.
    recompute_logp: whether log-probabilities of `evaluate` and `act` differ by
      more than float32's rounding, as in bfloat16. Losses then use those of
      `evaluate` and weight actions by the ratio of the two probabilities, as
      with `out_shapes`.
    round_params: `params -> params`: rounds parameters as `evaluate` does
      before it uses them, and as `act` and `resume` do where no engine acts;
      None where they round none. For a VLA, it also takes a dict of some of its
      parts.
    round_for_engine: `params -> params`: rounds parameters as an engine outside
      JAX does, to which `act` and `resume` send them; None where it rounds
      none.
    packed_tokens: room of a packed row in tokens, see
      `stages.language.scoring.packing`; None without packing.
    imitation_loss: `params, obs, action, keys, *, train -> loss`: what behavior
      cloning minimizes, one number a row. Demonstrated actions are on a scale
      where −1 … 1 is the environment's range. With `train`, a policy that
      augments pictures does so. None if the loss is the negative
      log-probability.
    imitation_is_mean: whether `imitation_loss` is a mean over the numbers of an
      action, as in flow matching, rather than their sum.
    trains_router: whether training includes the router of a mixture of experts.
    replays_routing: whether `act` takes `record`, see `routing_replay`.
    prepare_act: `params -> params`: the part of `act` that depends on the
      parameters alone, such as adding adapters to weights. `act` also takes the
      result in place of `params`, so that a loop of many actions computes it
      once. None where there is no such part.
    needs_raw_obs: whether observations must be in the environment's units, as
      the policy normalizes them by statistics of its own, or acts relative to a
      state. Workflows then refuse `normalize_obs`.
  """

  init: Callable[[Key], Params]
  act: Callable[..., Experience]
  evaluate: Callable[..., Evaluation]
  to_env_action: Callable[[Any], Any] | None = None
  value: Callable[..., Any] | None = None
  out_shapes: Callable[..., Experience] | None = None
  resume: Callable[..., Completions] | None = None
  empty_cache: Callable[[int], Any] | None = None
  empty_kept: Callable[[int], Any] | None = None
  recompute_logp: bool = False
  engine: core.EngineCost | None = None
  sampling: Any = None
  round_params: Callable[[Params], Params] | None = None
  round_for_engine: Callable[[Params], Params] | None = None
  packed_tokens: int | None = None
  imitation_loss: Callable[..., Any] | None = None
  imitation_is_mean: bool = False
  trains_router: bool = False
  replays_routing: bool = False
  prepare_act: Callable[[Params], Params] | None = None
  needs_raw_obs: bool = False

  @property
  def rounds(self) -> dict[int, Callable[[Params], Params]]:
    """`Stage.rounds` of a JAX stage whose first argument is the parameters."""
    return {0: self.round_params} if self.round_params else {}

  @property
  def can_take_turns(self) -> bool:
    """Whether it continues completions to which an environment adds tokens."""
    is_engine = self.out_shapes is not None
    has_cache = is_engine or self.empty_cache is not None
    return self.resume is not None and has_cache


class Workflow(NamedTuple):
  """An algorithm: initial state, training step and evaluation.

  Attributes:
    init: `key -> state`.
    step: `state, batch, key -> state, info`. Routes values between stages;
      arithmetic belongs inside a stage.
    evaluate: `state, batch, key -> info`: a second flow, which reads the state.
    params: `state -> params` of the trained policy, for export.
    staleness: steps that may overlap, as acting parameters are as much older.
    score: the metric of `evaluate` that measures the policy, between 0 and 1.
    allocate: `state, batch -> state`: makes room in a new state for what steps
      of such batches leave unfinished; None where they leave nothing.
  """

  init: Callable[[Key], Any]
  step: Callable[[Any, Any, Key], tuple[Any, Info]]
  evaluate: Callable[[Any, Any, Key], Info]
  params: Callable[[Any], Params]
  staleness: int = 0
  score: str = 'eval/accuracy'
  allocate: Callable[[Any, Any], Any] | None = None


class Source(NamedTuple):
  """A resumable stream of batches. Its state is part of every checkpoint.

  Attributes:
    init: `seed -> state`, a tree of NumPy arrays.
    next: `state, metrics -> state, batch`. `metrics` are the numbers of the
      step before (empty at first), so that a source may be a curriculum.
    held_out: `() -> batches`, a list that no training batch overlaps.
    text: `token, mask -> texts`, one a row, for logs; None where there is none.
    held_out_names: `() -> names` of the set of each batch of `held_out`; None
      where all are of one set.
    check: `state -> None`: raises a ValueError for the state of a source of
      other files, with which a run cannot go on; None without files.
  """

  init: Callable[[int], Any]
  next: Callable[[Any, dict[str, float]], tuple[Any, Any]]
  held_out: Callable[[], list[Any]]
  text: Callable[[Any, Any], list[str]] | None = None
  held_out_names: Callable[[], list[str]] | None = None
  check: Callable[[Any], None] | None = None
