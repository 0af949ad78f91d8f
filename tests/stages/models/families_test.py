"""Every architecture, compared with `transformers` in torch.

Sizes are odd, windows are shorter than the sequences, and caps and scalings
are strong enough to matter.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

import claims
from stages import base
from stages.language import huggingface, language_model, sample
from stages.models import families, transformer
from stages.models.files import weights
import torch_reference
from torch_reference import decode, keys, prompts, repeat, to_torch

torch = torch_reference.torch
STEPS = 16
# Torch returns no gradient for the embedding of a padding token.
COMMON = {
  'vocab_size': 61,
  'num_hidden_layers': 2,
  'rms_norm_eps': 1e-5,
  'pad_token_id': None,
}
SMALL = COMMON | {
  'hidden_size': 21,
  'num_attention_heads': 3,
  'num_key_value_heads': 1,
  'head_dim': 10,
  'intermediate_size': 19,
}
WIDE = COMMON | {
  'hidden_size': 28,
  'num_attention_heads': 7,
  'num_key_value_heads': 1,
  'head_dim': 6,
  'intermediate_size': 23,
}


def rope(theta=100.0, **scaling):
  return {'rope_type': 'default', 'rope_theta': theta} | scaling


CASES = {
  'qwen2, windows in the upper layers': (
    'qwen2',
    SMALL
    | {
      'use_sliding_window': True,
      'sliding_window': 4,
      'max_window_layers': 1,
      'rope_parameters': rope(),
    },
  ),
  'qwen3, seven queries per key, untied': (
    'qwen3',
    WIDE | {'tie_word_embeddings': False, 'rope_parameters': rope()},
  ),
  'qwen3, tied, biases': (
    'qwen3',
    SMALL
    | {
      'tie_word_embeddings': True,
      'attention_bias': True,
      'rope_parameters': rope(
        rope_type='yarn', factor=4.0, original_max_position_embeddings=16
      ),
    },
  ),
  'qwen3_moe, three of five experts': (
    'qwen3_moe',
    SMALL
    | {
      'moe_intermediate_size': 11,
      'num_experts': 5,
      'num_experts_per_tok': 3,
      'norm_topk_prob': True,
      'rope_parameters': rope(),
    },
  ),
  'llama, untied, llama3': (
    'llama',
    WIDE
    | {
      'tie_word_embeddings': False,
      'rope_parameters': rope(
        rope_type='llama3',
        factor=8.0,
        original_max_position_embeddings=16,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
      ),
    },
  ),
  'llama, tied, linear, biases': (
    'llama',
    SMALL
    | {
      'tie_word_embeddings': True,
      'attention_bias': True,
      'rope_parameters': rope(rope_type='linear', factor=3.0),
    },
  ),
  'mistral, windows': (
    'mistral',
    SMALL | {'sliding_window': 5, 'rope_parameters': rope()},
  ),
  'gemma': ('gemma', SMALL | {'rope_parameters': rope()}),
  'gemma2, caps and windows': (
    'gemma2',
    WIDE
    | {
      'query_pre_attn_scalar': 9,
      'attn_logit_softcapping': 2.0,
      'final_logit_softcapping': 3.0,
      'sliding_window': 4,
      'rope_parameters': rope(),
    },
  ),
  'gemma3, two ropes, untied': (
    'gemma3_text',
    SMALL
    | {
      'num_hidden_layers': 3,
      'layer_types': ['sliding_attention', 'full_attention']
      + ['sliding_attention'],
      'query_pre_attn_scalar': 7,
      'sliding_window': 5,
      'tie_word_embeddings': False,
      'rope_parameters': {
        'full_attention': rope(rope_type='linear', factor=2.0),
        'sliding_attention': rope(10.0),
      },
    },
  ),
}


# They differ in all that tells how a row is packed, or what is rounded: groups
# of queries, windows, experts, caps, the number of layers.
SOME = (
  'qwen3, seven queries per key, untied',
  'qwen3_moe, three of five experts',
  'gemma2, caps and windows',
  'gemma3, two ropes, untied',
)


class Case(NamedTuple):
  """The same model in torch and in JAX, and its folder."""

  model_type: str
  torch: Any
  folder: Any
  config: transformer.Config
  params: Any


@pytest.fixture(scope='module', params=CASES)
def case(request, tmp_path_factory):
  model_type, sizes = CASES[request.param]
  folder = tmp_path_factory.mktemp('model')
  reference = torch_reference.dressed(sizes, 0, model_type)
  reference.save_pretrained(folder)
  config = huggingface.load_config(folder)
  params = huggingface.load_params(folder, config)
  return Case(model_type, reference, folder, config, params)


@torch.no_grad()
def torch_logits(model, prompt):
  return torch_reference.logits(model, *to_torch(prompt)).float().numpy()


def real_logits(case, config, prompt):
  """Our logits of real tokens and those of `transformers`."""
  model = transformer.Transformer(config)
  got = jax.jit(model.apply)({'params': case.params}, *prompt)
  real = np.asarray(prompt.mask) > 0
  return np.asarray(got)[real], torch_logits(case.torch, prompt)[real]


def test_logits_are_those_of_transformers(case):
  for padding in 'left', 'right':
    prompt = prompts(case.config, [11, 7, 1, 4], padding)
    got, want = real_logits(case, case.config, prompt)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize('case', claims.some([*CASES], SOME), indirect=True)
def test_logits_in_bfloat16_are_near_those_in_float32(case):
  config = huggingface.load_config(case.folder, dtype='bfloat16')
  got, want = real_logits(case, config, prompts(config, [11, 7, 1, 4]))
  # Weights and activations of two or three layers have eight bits each.
  assert np.linalg.norm(got - want) <= 0.02 * np.linalg.norm(want)
  # The model rounds its weights, so weights that are rounded before change no
  # bit.
  rounded = transformer.compute_params(config, case.params)
  sizes = [
    sum(x.nbytes for x in jax.tree.leaves(p)) for p in (rounded, case.params)
  ]
  assert sizes[0] < 0.6 * sizes[1]
  again, _ = real_logits(
    case._replace(params=rounded), config, prompts(config, [11, 7, 1, 4])
  )
  np.testing.assert_array_equal(got, again)


def test_cached_decoding_sees_the_logits_of_transformers(case, monkeypatch):
  logits, shape = [], sample.shape

  def spy(logit_BTV, sampling):
    jax.debug.callback(logits.append, logit_BTV[:, 0], ordered=True)
    return shape(logit_BTV, sampling)

  monkeypatch.setattr(sample, 'shape', spy)
  policy = language_model.policy(case.config, response_length=STEPS)
  group_size, lengths = 2, [9, 1, 5]
  prompt = repeat(prompts(case.config, lengths), group_size)
  act = jax.jit(lambda *args: policy.act(*args, group_size=group_size))
  x = jax.block_until_ready(act(case.params, prompt, keys(6)))
  jax.effects_barrier()
  action = torch.tensor(np.asarray(x.action)).long()
  want = decode(case.torch, prompt, action)
  got = np.stack([np.asarray(step) for step in logits], 1)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


# It has two kinds of layers.
@pytest.mark.parametrize('case', ['gemma3, two ropes, untied'], indirect=True)
def test_resumed_rows_see_their_old_tokens_within_the_window(case):
  policy = language_model.policy(case.config, response_length=STEPS)
  prompt = prompts(case.config, [9, 1, 5])
  act = jax.jit(functools.partial(policy.act, greedy=True))
  whole = act(case.params, prompt, keys(3))
  # Rows stop after different numbers of tokens.
  mask = jnp.arange(STEPS)[None] < jnp.array([[7], [3], [0]])
  started = base.Completions(
    whole.action * mask,
    whole.logp * mask,
    mask.astype(jnp.float32),
    jnp.ones(3, bool),
  )
  resume = jax.jit(functools.partial(policy.resume, num_started=3, greedy=True))
  resumed = resume(case.params, prompt, keys(3), started)
  np.testing.assert_array_equal(resumed.action, whole.action)
  np.testing.assert_allclose(resumed.logp, whole.logp, rtol=0, atol=1e-5)


def test_gradients_are_those_of_torch(case):
  compare_gradients(case)


@pytest.mark.parametrize('case', claims.some([*CASES], SOME), indirect=True)
def test_gradients_of_packed_rows_are_those_of_torch(case):
  # Two packed rows, 8 + 7 + 7 + 5 + 7 and 5 + 7 + 1 + 7 + 7: one group in both.
  compare_gradients(case, packed_tokens=34)


def compare_gradients(case, packed_tokens=None):
  rng = np.random.default_rng(0)
  lengths, group_size, T = [6, 2, 9], 2, 7
  action = rng.integers(0, case.config.V, (6, T))
  weight = rng.normal(size=(6, T)).astype(np.float32)
  prompt = repeat(prompts(case.config, lengths), group_size)
  policy = language_model.policy(
    case.config, response_length=T, packed_tokens=packed_tokens
  )
  mask = None if packed_tokens is None else jnp.ones((6, T))

  def loss(params):
    scored = policy.evaluate(
      params, prompt, jnp.asarray(action), group_size=group_size, mask=mask
    )
    return (scored.logp * weight).sum()

  gradient = jax.jit(jax.grad(loss))(case.params)
  names = families.FAMILIES[case.model_type].names
  got = dict(
    weights.checkpoint_tensors(jax.tree.map(np.asarray, gradient), names)
  )
  case.torch.zero_grad()
  logp = torch_reference.logp(
    case.torch, prompt, torch.tensor(action), torch.ones(6, T)
  )
  (logp * torch.tensor(weight)).sum().backward()
  want = torch_reference.gradients(case.torch)
  assert got.keys() == want.keys()
  for name, x in want.items():
    assert np.linalg.norm(x) > 0, name
    assert np.linalg.norm(got[name] - x) <= 1e-4 * np.linalg.norm(x), name


def test_transformers_reads_what_we_write(case, tmp_path):
  huggingface.save(
    tmp_path, case.params, case.config, model_type=case.model_type
  )
  again = huggingface.load_config(tmp_path)
  jax.tree.map(
    np.testing.assert_array_equal,
    huggingface.load_params(tmp_path, again),
    case.params,
  )
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path,
    output_loading_info=True,
    attn_implementation=case.torch.config._attn_implementation,
    experts_implementation='eager',
  )
  assert not any(info.values())
  prompt = prompts(case.config, [11, 7])
  np.testing.assert_array_equal(
    torch_logits(model, prompt), torch_logits(case.torch, prompt)
  )
