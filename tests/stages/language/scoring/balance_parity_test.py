"""The balance of experts, compared with that of `transformers`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from stages.language import huggingface, language_model, policy_stages
from stages.models import families
from stages.models.files import weights
from tests.stages.models import families_test
import torch_reference
from torch_reference import prompts

torch = torch_reference.torch
SIZES = families_test.CASES['qwen3_moe, three of five experts'][1]
E, K = SIZES['num_experts'], SIZES['num_experts_per_tok']


def torch_balance(model, tokens):
  """Their loss of one sequence, a mean over layers, on our scale.

  Theirs is of all layers together, and k times ours.
  """
  from transformers.models.qwen3_moe import modeling_qwen3_moe as theirs

  found = model(torch.tensor(tokens)[None].long(), output_router_logits=True)
  layers = [
    theirs.load_balancing_loss_func((logits,), E, K)
    for logits in found.router_logits
  ]
  return sum(layers) / len(layers) / K


def test_loss_and_gradients_of_sequences_are_those_of_transformers(tmp_path):
  reference = torch_reference.dressed(SIZES, 0, 'qwen3_moe')
  reference.save_pretrained(tmp_path)
  config = huggingface.load_config(tmp_path)
  params = huggingface.load_params(tmp_path, config)
  policy = language_model.policy(config, response_length=7)
  prompt, lengths = prompts(config, [9, 1, 5]), np.array([7, 6, 1])
  action = np.random.default_rng(0).integers(0, config.V, (3, 7))
  mask = (np.arange(7)[None] < lengths[:, None]).astype(np.float32)

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def slopes(params):
    now = policy_stages.score(
      policy, params, prompt, jnp.asarray(action), mask, balance=True
    )
    return now.balance.loss[:, 0].sum(), now.balance.loss[:, 0]

  gradient, got = slopes(params)
  for x in reference.parameters():  # Those of the last experts have none.
    x.grad = torch.zeros_like(x)
  for b, length in enumerate(lengths):
    own = np.asarray(prompt.token[b])[np.asarray(prompt.mask[b]) > 0]
    want = torch_balance(reference, [*own, *action[b, : length - 1]])
    np.testing.assert_allclose(got[b], want.item(), rtol=1e-5)
    want.backward()
  names = families.FAMILIES['qwen3_moe'].names
  got = dict(
    weights.checkpoint_tensors(jax.tree.map(np.asarray, gradient), names)
  )
  routers = {x for x in got if x.endswith('mlp.gate.weight')}
  assert len(routers) == config.L
  for name, x in torch_reference.gradients(reference).items():
    norm = np.linalg.norm(x)
    assert np.linalg.norm(got[name] - x) <= 1e-4 * norm + 1e-7, name
    assert norm > 0 or name not in routers
