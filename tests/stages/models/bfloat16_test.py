"""Every architecture in bfloat16, compared with float32 and `transformers`.

Weights are numbers of bfloat16, so that only arithmetic differs. bfloat16 has
eight bits: rounding is off by 2^-9 of a number at most, by 0.1 % on average.
Layers round some thirty times between tokens and logits. That adds up to 0.5 %
of logits of size two: 0.01 nats.
"""

import copy
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bfloat16
import claims
from stages import base
from stages.language import huggingface, language_model
from stages.models import transformer
from tests.stages.models import families_test
import torch_reference

torch = torch_reference.torch
# As many tokens as in a micro-batch: errors of single tokens cancel in sums.
N, GROUP, P, T = 128, 8, 4, 128
FEW = 16  # Rows that torch scores.
OFTEN = 5  # A token that is half of all tokens: gradients of tokens agree.
# In nats: twice what thirty roundings add up to, and six times that.
RMS, WORST = 0.02, 0.12
# Caps as published. Those of `families_test` hide most of every logit.
PUBLISHED = {'attn_logit_softcapping': 50.0, 'final_logit_softcapping': 30.0}
# One of each type.
CASES = {kind: (kind, sizes) for kind, sizes in families_test.CASES.values()}
ALWAYS = ('gemma2',)  # With caps, windows and norms after each part.


class Case(NamedTuple):
  """A model in torch and in JAX, and its scores in both types.

  Attributes:
    torch: the model in float32.
    config: in bfloat16.
    params: in float32.
    scored: log-probabilities [N, T] and gradients, by type.
    score: returns the two for completions, in bfloat16.
  """

  torch: Any
  config: transformer.Config
  params: Any
  scored: dict[str, Any]
  score: Any


def batch(config):
  rng = np.random.default_rng(1)
  token = rng.integers(0, config.V, (N // GROUP, P), np.int32)
  prompt = base.Prompt(jnp.asarray(token), jnp.ones_like(token))
  action = rng.integers(0, config.V, (N, T), np.int32)
  action = np.where(rng.random(action.shape) < 0.5, OFTEN, action)
  return torch_reference.repeat(prompt, GROUP), jnp.asarray(action)


def scorer(config):
  """Returns a function to log-probabilities and gradients of their mean."""
  policy = language_model.policy(config, response_length=T)

  def loss(params, prompt, action):
    logp = policy.evaluate(params, prompt, action, group_size=GROUP).logp
    return -logp.mean(), logp

  def score(*args):
    (_, logp), gradient = jax.value_and_grad(loss, has_aux=True)(*args)
    return logp, gradient

  return jax.jit(score)


@pytest.fixture(scope='module', params=claims.some(CASES, ALWAYS))
def case(request, tmp_path_factory):
  kind, sizes = CASES[request.param]
  sizes = sizes | {k: v for k, v in PUBLISHED.items() if k in sizes}
  reference = torch_reference.dressed(sizes, 0, kind)
  for name, weight in reference.named_parameters():
    weight.data = weight.data.bfloat16().float()
    if 'embed' in name or 'lm_head' in name:
      # Logits of a few nats: if one is off by 0.01, so is its probability.
      weight.data /= 4
  folder = tmp_path_factory.mktemp('model')
  reference.save_pretrained(folder)
  wide = huggingface.load_config(folder)
  narrow = dataclasses.replace(wide, dtype='bfloat16')
  params = huggingface.load_params(folder, wide)
  score = scorer(narrow)
  data = batch(wide)
  scored = {
    'float32': jax.device_get(scorer(wide)(params, *data)),
    'bfloat16': jax.device_get(score(params, *data)),
  }
  return Case(reference, narrow, params, scored, score)


def rms(x):
  return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def check(case, difference):
  """Checks differences of log-probabilities."""
  usual = np.abs(difference) < WORST
  # Rounding sends some tokens to other experts.
  assert usual.mean() > 0.99 if case.config.E else usual.all()
  assert rms(difference[usual]) < RMS


def test_log_probabilities_are_near_those_of_float32(case):
  check(case, case.scored['bfloat16'][0] - case.scored['float32'][0])


def test_gradients_of_all_leaves_are_near_those_of_float32(case):
  bfloat16.check(*(case.scored[x][1] for x in ('float32', 'bfloat16')))


def test_decoding_is_near_scoring(case):
  policy = language_model.policy(case.config, response_length=T)
  prompt, _ = batch(case.config)
  act = jax.jit(functools.partial(policy.act, group_size=GROUP))
  x = act(case.params, prompt, torch_reference.keys(N))
  logp, _ = case.score(case.params, prompt, x.action)
  check(case, np.asarray(x.logp) - np.asarray(logp))


@torch.no_grad()
def test_bfloat16_is_no_further_from_float32_than_transformers_is(case):
  prompt, action = jax.tree.map(lambda x: x[:FEW], batch(case.config))
  narrow = copy.deepcopy(case.torch).to(torch.bfloat16)
  want, theirs = (
    torch_reference.logp(
      model, prompt, torch.tensor(np.asarray(action)).long(), torch.ones(FEW, T)
    )
    for model in (case.torch, narrow)
  )
  want, theirs = want.numpy(), theirs.float().numpy()
  ours = case.scored['bfloat16'][0][:FEW]
  assert rms(ours - want) < rms(theirs - want)
  # Both round independently, and they round their logits, too.
  assert rms(ours - theirs) < 2 * RMS
