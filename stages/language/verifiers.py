"""Verifiers that have parameters, such as reward models."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

import stages
from stages import base
from stages.language import value_model

FAILED = 'failed'  # The term that is 1 on completions where a reward failed.


class LearnedVerifier(NamedTuple):
  """A verifier whose parameters a workflow carries in its state.

  Attributes:
    init: `key -> params`.
    verify: `params, answer, experience -> base.Verdict`, made of stages. The
      experience has prompts, completions and masks.
  """

  init: Callable[[base.Key], base.Params]
  verify: Callable[..., base.Verdict]

  def __call__(self, answer, action, mask):
    refuse_learned(self)


class Scorer(NamedTuple):
  """A learned reward.

  Attributes:
    name: its name in metrics.
    init: `key -> params`.
    score: `params, answer, experience -> score_B`, made of stages.
    weight: its weight in the sum of rewards.
  """

  name: str
  init: Callable[[base.Key], base.Params]
  score: Callable[..., jax.Array]
  weight: float = 1.0


def scorer(
  name: str, model: value_model.ValueModel, weight: float = 1.0
) -> Scorer:
  """A learned reward whose model reads the policy's own tokens."""
  run = value_model.score_completions(model)
  stage = stages.Stage(run, name, unbatched=(0,))
  return Scorer(
    name,
    model.init,
    lambda params, answer, x: stage(params, x.obs, x.action, x.mask),
    weight,
  )


def add_scores(
  verify: stages.Stage | None,
  scorers: Sequence[Scorer],
  *,
  decides: bool = False,
) -> LearnedVerifier:
  """Adds learned rewards to the verdict of a stage, each logged by its name.

  A score that is not finite is replaced by 0, and the term `FAILED` of its
  completion is 1.

  Args:
    verify: stage `answer, action, mask -> base.Verdict` of other rewards; None
      without any.
    scorers: learned rewards.
    decides: whether completions are correct where the first score is above 1/2,
      rather than where `verify` says so.
  """

  @stages.stage('add_rewards')
  def add(verdict: base.Verdict, *score_B):
    terms = dict(verdict.terms)
    terms.setdefault(FAILED, jnp.zeros_like(verdict.reward))
    total_B, correct_B = verdict.reward, verdict.correct
    for s, x_B in zip(scorers, score_B, strict=True):
      is_bad_B = ~jnp.isfinite(x_B)
      terms[FAILED] = jnp.maximum(terms[FAILED], is_bad_B)
      terms[s.name] = jnp.where(is_bad_B, 0.0, x_B).astype(total_B.dtype)
      total_B += s.weight * terms[s.name]
    if decides:
      correct_B = (terms[scorers[0].name] > 0.5).astype(correct_B.dtype)
    return verdict._replace(reward=total_B, correct=correct_B, terms=terms)

  @stages.stage('no_rewards')
  def nothing(mask_BT):
    zero_B = jnp.zeros(mask_BT.shape[0], jnp.float32)
    return base.Verdict(zero_B, zero_B, {})

  def init(key):
    keys = jax.random.split(key, len(scorers))
    return {s.name: s.init(k) for s, k in zip(scorers, keys, strict=True)}

  def judge(params, answer, x: base.Experience):
    verdict = verify(answer, x.action, x.mask) if verify else nothing(x.mask)
    return add(verdict, *(s.score(params[s.name], answer, x) for s in scorers))

  return LearnedVerifier(init, judge)


def refuse_learned(verify: stages.Stage | LearnedVerifier | None):
  """Raises a ValueError for a learned verifier.

  For workflows that have no place for its parameters in their state.
  """
  if isinstance(verify, LearnedVerifier):
    raise ValueError(
      'A learned reward has parameters, and this workflow calls its verifier '
      'without any: use another, such as grpo or ppo, or leave reward '
      'models out.'
    )


def init(verify: stages.Stage | LearnedVerifier, key) -> base.Params:
  """The frozen parameters of a verifier; `()` for a stage, which has none."""
  if isinstance(verify, LearnedVerifier):
    return {base.FROZEN: verify.init(key)}
  return ()


def judge(
  verify: stages.Stage | LearnedVerifier, params, answer, x: base.Experience
) -> base.Verdict:
  """The verdict on completions, by a verifier with the parameters of `init`."""
  if isinstance(verify, LearnedVerifier):
    return verify.verify(params[base.FROZEN], answer, x)
  return verify(answer, x.action, x.mask)
