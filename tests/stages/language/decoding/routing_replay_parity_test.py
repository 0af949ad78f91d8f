"""Routing replay against `transformers`, whose routers are given experts."""

import jax
import jax.numpy as jnp
import numpy as np

from stages.language import huggingface, language_model, policy_stages
from stages.language.decoding import routing_replay
from stages.models import families
from stages.models.files import weights
from tests.stages.language.scoring.balance_parity_test import E, K, SIZES
import torch_reference
from torch_reference import prompts

torch = torch_reference.torch
T = 7


def give(gate, expert):
  """Makes a router of torch use these experts, [tokens, k], in its forward."""

  def forward(hidden_states):
    logits = torch.nn.functional.linear(hidden_states, gate.weight)
    logits = logits.reshape(-1, E)
    score = torch.softmax(logits, -1).gather(1, expert)
    return logits, score / score.sum(-1, keepdim=True), expert

  gate.forward = forward


def test_logps_and_gradients_with_given_experts_are_those_of_torch(tmp_path):
  reference = torch_reference.dressed(SIZES, 0, 'qwen3_moe')
  reference.save_pretrained(tmp_path)
  config = huggingface.load_config(tmp_path)
  params = huggingface.load_params(tmp_path, config)
  policy = language_model.policy(config, response_length=T, replay_routing=True)
  prompt, rng = prompts(config, [9, 1, 5]), np.random.default_rng(0)
  action = rng.integers(0, config.V, (3, T))
  weight = rng.normal(size=(3, T)).astype(np.float32)
  P = prompt.token.shape[1]
  expert = np.argsort(rng.random((3, P + T, config.L, E)))[..., :K]
  routing = routing_replay.Routing(
    *(jnp.asarray(x, jnp.uint8) for x in np.split(expert, [P], axis=1))
  )

  @jax.jit
  @jax.grad
  def slopes(params):
    now = policy_stages.score(
      policy, params, prompt, jnp.asarray(action), None, routing=routing
    )
    return (now.logp * weight).sum()

  reference.zero_grad()
  for b in range(3):
    is_read = np.asarray(prompt.mask[b]) > 0
    is_read[np.flatnonzero(is_read)[-1]] = False  # It is read as `completion`.
    own = np.asarray(prompt.token[b])[np.asarray(prompt.mask[b]) > 0]
    tokens = torch.tensor([*own, *action[b, :-1]]).long()
    for i, layer in enumerate(reference.model.layers):
      chosen = [*expert[b, :P, i][is_read], *expert[b, P:, i]]
      give(layer.mlp.gate, torch.tensor(np.stack(chosen)).long())
    logits = reference(tokens[None]).logits[0, -T:]
    logp = torch.log_softmax(logits, -1)
    taken = logp.gather(1, torch.tensor(action[b])[:, None])[:, 0]
    (taken * torch.tensor(weight[b])).sum().backward()
  names = families.FAMILIES['qwen3_moe'].names
  got = dict(
    weights.checkpoint_tensors(jax.tree.map(np.asarray, slopes(params)), names)
  )
  want = torch_reference.gradients(reference)
  assert got.keys() == want.keys()
  for name, x in want.items():
    assert np.linalg.norm(x) > 0, name
    assert np.linalg.norm(got[name] - x) <= 1e-4 * np.linalg.norm(x), name
