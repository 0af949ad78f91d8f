"""Qwen2 of `transformers` with weights made by code, and GRPO's loss in torch.

Random weights of the usual scale make nearly flat attention, biases of zero and
norms of one, which would hide mistakes; here each of them matters.
"""

import functools

import numpy as np
import pytest

torch = pytest.importorskip('torch', reason='Reference models need torch.')

import transformers  # noqa: E402

# Sizes are odd where they may be, and rope is stretched within a few tokens.
CASES = {
  'one query a key, untied': {
    'hidden_size': 24,
    'num_attention_heads': 2,
    'num_key_value_heads': 2,
    'intermediate_size': 37,
    'vocab_size': 101,
    'num_hidden_layers': 1,
    'tie_word_embeddings': False,
    'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e4},
  },
  'two queries a key, tied, linear': {
    'hidden_size': 20,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 6,
    'intermediate_size': 29,
    'vocab_size': 97,
    'num_hidden_layers': 2,
    'tie_word_embeddings': True,
    'rope_parameters': {
      'rope_type': 'linear',
      'rope_theta': 1e4,
      'factor': 3.0,
    },
  },
  'four queries a key, untied, yarn': {
    'hidden_size': 36,
    'num_attention_heads': 4,
    'num_key_value_heads': 1,
    'head_dim': 16,
    'intermediate_size': 31,
    'vocab_size': 89,
    'num_hidden_layers': 2,
    'tie_word_embeddings': False,
    'max_position_embeddings': 256,
    'rope_parameters': {
      'rope_type': 'yarn',
      'rope_theta': 100.0,
      'factor': 4.0,
      'original_max_position_embeddings': 64,
    },
  },
  'two queries a key, tied, llama3': {
    'hidden_size': 28,
    'num_attention_heads': 6,
    'num_key_value_heads': 3,
    'head_dim': 14,
    'intermediate_size': 33,
    'vocab_size': 83,
    'num_hidden_layers': 3,
    'tie_word_embeddings': True,
    'rms_norm_eps': 1e-5,
    'rope_parameters': {
      'rope_type': 'llama3',
      'rope_theta': 100.0,
      'factor': 8.0,
      'original_max_position_embeddings': 16,
      'low_freq_factor': 1.0,
      'high_freq_factor': 4.0,
    },
  },
}


@functools.cache
def model(case: str, seed: int = 0):
  """A model of one of the `CASES`, in float32."""
  return dressed(CASES[case], seed)


def dressed(sizes, seed: int):
  """A model of these sizes with weights that matter, in float32."""
  # Small models gain nothing from threads, which wait by spinning.
  torch.set_num_threads(1)
  made = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)).eval()
  rng = np.random.default_rng(seed)
  for name, weight in made.named_parameters():
    value = rng.normal(size=weight.shape)
    if 'norm' in name:
      value = 1.0 + 0.1 * value
    elif 'embed' in name or name.endswith('bias'):
      value = 0.5 * value
    else:
      value = value / np.sqrt(weight.shape[-1])
    weight.data = torch.tensor(value, dtype=torch.float32)
  return made


def positions(mask_BP):
  return (torch.cumsum(mask_BP, 1) - 1).clamp(min=0)


def logits(model, token_BP, mask_BP):
  """Logits after every token: the textbook forward."""
  return model(
    input_ids=token_BP,
    attention_mask=mask_BP,
    position_ids=positions(mask_BP),
    use_cache=False,
  ).logits


def logp(model, prompt, action_BT, mask_BT, temperature=1.0):
  """Log-probability of each token of completions of left-padded prompts."""
  token_BP, seen_BP = (torch.tensor(np.asarray(x)).long() for x in prompt)
  logit_BSV = logits(
    model,
    torch.cat([token_BP, action_BT], 1),
    torch.cat([seen_BP, mask_BT.long()], 1),
  )
  logp_BTV = torch.log_softmax(
    logit_BSV[:, token_BP.shape[1] - 1 : -1] / temperature, -1
  )
  return logp_BTV.gather(-1, action_BT[..., None])[..., 0]


def group_relative(reward_B, group):
  """Advantages of arXiv:2402.03300, by rows."""
  reward_NG = reward_B.reshape(-1, group)
  centred_NG = reward_NG - reward_NG.mean(1, keepdim=True)
  advantage_NG = centred_NG / (reward_NG.std(1, keepdim=True) + 1e-6)
  alike_N = reward_NG.amax(1) == reward_NG.amin(1)
  advantage_NG[alike_N] = 0.0
  return advantage_NG.reshape(-1)


def grpo_loss(logp_BT, old_BT, ref_BT, advantage_B, mask_BT, low, high, kl):
  """GRPO's loss: the mean over rows of their means over tokens."""
  ratio_BT = torch.exp(logp_BT - old_BT)
  clipped_BT = ratio_BT.clamp(1 - low, 1 + high)
  gain_BT = torch.minimum(
    ratio_BT * advantage_B[:, None], clipped_BT * advantage_B[:, None]
  )
  delta_BT = ref_BT - logp_BT
  k3_BT = torch.exp(delta_BT) - delta_BT - 1
  loss_BT = (kl * k3_BT - gain_BT) * mask_BT
  return (loss_BT.sum(1) / mask_BT.sum(1)).mean()
