"""Verifiers with parameters of their own, such as those of a reward model."""

from collections.abc import Callable
from typing import NamedTuple

import stages
from stages import base


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
    raise ValueError(
      'A learned reward has parameters, and this workflow calls its verifier '
      'without any: use grpo (without greedy_baseline) or text_ppo, or leave '
      'reward models out.'
    )


def init(verify: stages.Stage | LearnedVerifier, key) -> base.Params:
  """The parameters of a verifier; `()` for a stage, which has none."""
  return verify.init(key) if isinstance(verify, LearnedVerifier) else ()


def judge(
  verify: stages.Stage | LearnedVerifier, params, answer, x: base.Experience
) -> base.Verdict:
  """The verdict on completions, by a verifier of either kind."""
  if isinstance(verify, LearnedVerifier):
    return verify.verify(params, answer, x)
  return verify(answer, x.action, x.mask)
