"""A verifier that shuffles rewards over rows, for a control experiment."""

import zlib

import numpy as np

import stages
from stages import base


def rewards(verify: stages.Stage) -> stages.Stage:
  """A verifier like `verify`, whose rewards are shuffled over the batch.

  Correctness, which metrics report, is not shuffled. The permutation is seeded
  by the completions, so that the stage remains a pure function.
  """

  def judge(answer, action_BT, mask_BT) -> base.Verdict:
    verdict = verify.fn(answer, action_BT, mask_BT)
    rng = np.random.default_rng(zlib.crc32(action_BT.tobytes()))
    return verdict._replace(reward=rng.permutation(verdict.reward))

  return stages.Stage(
    judge, verify.name, 'batch', host=True, out_shapes=verify.out_shapes
  )
