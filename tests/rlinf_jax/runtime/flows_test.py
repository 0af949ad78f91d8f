"""The lines of a run's header about the flow of a step."""

import dataclasses

import jax
import pytest

from rlinf_jax.runtime import flows
from stages import base, kernels, workflows
from stages.language import language_model
from stages.learn import optimizers
import tiny


def flow(attention):
  config = dataclasses.replace(tiny.CONFIG, attention=attention)
  policy = language_model.policy(config, response_length=tiny.LENGTH, stop=(0,))
  workflow = workflows.grpo(
    policy, tiny.even, optimizers.adamw(1e-2), group_size=4, kl_coef=1.0
  )
  return tiny.trace(workflow, tiny.problem())


def test_attention_is_named_with_the_stages_that_compute_it():
  recorded = flow('chunked')
  named = flows.attention(recorded, jax.default_backend())
  assert named == 'chunked in generate, ref_logp, gradient'
  # For a TPU, nothing was traced.
  assert flows.attention(recorded, 'tpu') == ''


def test_why_there_is_no_kernel_is_said_once_for_all_stages():
  short = kernels.Choice('chunked', 'sequences are short')
  kernel = kernels.Choice('splash')
  chosen = {'generate': {short}, 'gradient': {kernel, short}, 'apply': set()}
  assert kernels.describe(chosen) == (
    'chunked (sequences are short) in generate, gradient; splash in gradient'
  )


EMPTY = jax.tree.map(lambda x: x[:0], tiny.problem())


@pytest.mark.parametrize(
  ('batch', 'held_out', 'message'),
  [
    (tiny.problem(), [], 'has no held-out batch: let its'),
    (EMPTY, [tiny.problem()], 'The first batch of the source has no rows'),
    (tiny.problem(), [EMPTY], 'The first held-out batch of the source has no'),
  ],
)
def test_a_source_without_rows_is_refused(batch, held_out, message):
  workflow = workflows.reinforce(
    language_model.policy(tiny.CONFIG, response_length=tiny.LENGTH, stop=(0,)),
    tiny.even,
    optimizers.adamw(1e-2),
    group_size=4,
  )
  source = base.Source(
    lambda seed: (), lambda state, _: (state, batch), lambda: held_out
  )
  with pytest.raises(ValueError, match=message):
    flows.trace_flows(workflow, source, 0)
