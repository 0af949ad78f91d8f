"""Types of the functions that users pass to workflows.

Each is a pure function of arrays. B is a row, T a token or a step, and G a row
of a group; `mask_BT` is 1 on the tokens that count.
"""

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from stages import metrics

Tokens = Float[Array, 'B T']

GroupAdvantage = Callable[[Float[Array, ' G']], Float[Array, ' G']]
"""`reward_G -> advantage_G`: the advantages of the rows of one group."""

TurnAdvantage = Callable[
  [Float[Array, 'G K'], Float[Array, 'G K'], Int[Array, 'G K']],
  Float[Array, 'G K'],
]
"""`reward_GK, taken_GK, state_GK -> advantage_GK`: the advantages of turns.

G are the conversations of one group, and K their turns, or its episodes and
their steps: the reward of each, 1 where it was taken, and a number of the state
that it was taken in.
"""

GroupSelection = Callable[
  [Float[Array, ' G'], Float[Array, ' G']], Float[Array, ' G']
]
"""`reward_G, correct_G -> keep_G`: 1 for the rows of a group to learn from."""

PolicyLoss = Callable[[Tokens, Tokens, Tokens, float, float], Tokens]
"""`logp, old_logp, advantage, clip_low, clip_high -> loss`, for each token.

`old_logp` are log-probabilities before the update. The loss is minimized.
"""

KlEstimator = Callable[[Tokens, Tokens], Tokens]
"""`logp, ref_logp -> KL`, for each token, estimated from the sampled one."""

Likelihood = Callable[[Tokens, Tokens], Tokens]
"""`logp_BT, mask_BT -> logp_BT`: the log-probabilities whose ratio is clipped.

They are those of tokens, or that of the sequence on each of its tokens.
"""

Aggregate = Callable[[Tokens, Tokens], metrics.Mean]
"""`loss_BT, mask_BT -> Mean`: the loss of a batch, as numerator and count."""

ImportanceWeight = Callable[[Tokens, Tokens, Tokens], Tokens]
"""`proximal_logp, behavior_logp, mask -> weight` of each token's loss."""

ImportanceBound = Callable[[Tokens, float], Tokens]
"""`weight, importance_cap -> weight`, truncated or masked by the bound."""

Lambda = float | Callable[[Float[Array, ' B']], Float[Array, ' B']]
"""λ of GAE, or `length_B -> λ_B` by the tokens of each completion."""
