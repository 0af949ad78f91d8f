"""A verifier that tells the truth to the wrong rows."""

import zlib

import numpy as np

import stages
from stages import base


def rewards(verify: stages.Stage) -> stages.Stage:
  """`verify` with its rewards dealt out at random over the whole batch.

  What is correct stays true. The shuffle is drawn from the completions
  themselves, so that the stage stays a function of its arguments.
  """

  def judge(answer, action_BT, mask_BT) -> base.Verdict:
    verdict = verify.fn(answer, action_BT, mask_BT)
    rng = np.random.default_rng(zlib.crc32(action_BT.tobytes()))
    return verdict._replace(reward=rng.permutation(verdict.reward))

  return stages.Stage(
    judge, verify.name, 'batch', host=True, out_shapes=verify.out_shapes
  )
