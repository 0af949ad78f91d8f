"""The nouns. Arrays live in NamedTuples; behaviour lives in functions.

Array names end in their dimensions, one capital letter each:

  B row    N group    G row within a group    M row of a minibatch
  P prompt token    T completion token or step    C token that may be looked at
  S position in a group: its prompt, then its completions end to end
  V vocabulary    D model width    H head    K key-value head    W head width
  J head among those of a key-value head    Q query among those of its keys
  F feed-forward width    L layer    R half a head width: a rotated plane
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

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


class Experience(NamedTuple):
  """What a policy did, and what came of it.

  A token is an action whose observation is its prefix: `obs` is where the row
  began, and the actions before a step complete it.

  Attributes:
    obs: what the policy saw before its first action.
    action: what it did.
    logp: log-probability it gave to `action` when it acted, of the very
      distribution that it sampled from.
    mask: one where `action` was its own; zero after the end.
    truncated: one where the limit of length ended the row, not the policy.
    version: updates that the parameters had seen which the row acted by.
    advantage: how much better than expected.
    proximal: log-probability that its trainer gives to `action` by the same
      parameters, where an engine acted whose arithmetic is another; None where
      `logp` is that.
  """

  obs: Any
  action: Int[Array, 'B T']
  logp: Float[Array, 'B T']
  mask: Float[Array, 'B T']
  truncated: Float[Array, ' B']
  version: Int[Array, ' B'] | None = None
  advantage: Float[Array, 'B T'] | None = None
  proximal: Float[Array, 'B T'] | None = None


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
  """

  logp: Float[Array, 'B T']
  entropy: Float[Array, 'B T']


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
    act: `params, obs, keys, *, group=1, greedy=False -> Experience`, one key a
      row. Rows come in groups of `group` that share their observation, next to
      each other, so that it need be read only once. `greedy` takes the
      likeliest action instead of a draw.
    evaluate: `params, obs, action, *, group=1 -> Evaluation`.
    like: `params, obs, keys -> Experience` of shapes, where `act` runs outside
      JAX, on an engine that computes log-probabilities in its own way; None
      where both are one.
  """

  init: Callable[[Key], Params]
  act: Callable[..., Experience]
  evaluate: Callable[..., Evaluation]
  like: Callable[..., Experience] | None = None


class Workflow(NamedTuple):
  """An algorithm: where it starts, what one step does, how it is judged.

  Attributes:
    init: `key -> state`.
    step: `state, batch, key -> state, info`. It only routes values between
      stages; arithmetic belongs inside a stage.
    evaluate: `state, batch, key -> info`: a second flow, which reads the state.
    params: `state -> params` of the policy that the workflow makes.
    lag: steps that may be begun before an earlier one has ended, as what they
      read of the state is that much older.
  """

  init: Callable[[Key], Any]
  step: Callable[[Any, Any, Key], tuple[Any, Info]]
  evaluate: Callable[[Any, Any, Key], Info]
  params: Callable[[Any], Params]
  lag: int = 0


class Source(NamedTuple):
  """Where batches come from. Its state is checkpointed with the rest.

  Attributes:
    init: `seed -> state`, a tree of NumPy arrays.
    next: `state, metrics -> state, batch`, where `metrics` are the numbers of
      the step before (empty at first), so that a source may be a curriculum.
    held_out: `() -> batches`, a list that no training batch overlaps.
    text: `token, mask -> texts` of rows, for people to read.
  """

  init: Callable[[int], Any]
  next: Callable[[Any, dict[str, float]], tuple[Any, Any]]
  held_out: Callable[[], list[Any]]
  text: Callable[[Any, Any], list[str]]
