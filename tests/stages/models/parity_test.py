"""Logits, samples and gradients, compared with `transformers` in torch."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import torch as st
import transformers

import stages
from stages import base, workflows
from stages.language import huggingface, language_model, sample
from stages.models import transformer
from stages.models.files import decoder_names, weights, weights_writer
import torch_reference
from torch_reference import decode, keys, prompts, repeat, to_torch

torch = torch_reference.torch
STEPS = 16


class Case(NamedTuple):
  """The same model in torch and in JAX, and its folder."""

  torch: Any
  folder: Any
  config: transformer.Config
  params: Any


@pytest.fixture(scope='module', params=torch_reference.CASES)
def case(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp('model')
  reference = torch_reference.model(request.param)
  reference.save_pretrained(folder)
  config = huggingface.load_config(folder)
  return Case(
    reference, folder, config, huggingface.load_params(folder, config)
  )


def test_logits_of_padded_prompts_are_those_of_transformers(case):
  model = transformer.Transformer(case.config)
  forward = jax.jit(lambda *args: model.apply({'params': case.params}, *args))
  for padding in 'left', 'right':
    prompt = prompts(case.config, [11, 7, 1, 4], padding)
    got = np.asarray(forward(*prompt))
    with torch.no_grad():
      want = torch_reference.logits(case.torch, *to_torch(prompt)).numpy()
    real = np.asarray(prompt.mask) > 0
    np.testing.assert_allclose(got[real], want[real], rtol=0, atol=1e-4)


def test_cached_decoding_sees_the_logits_of_transformers(case, monkeypatch):
  logits, shape = [], sample.shape

  def spy(logit_BTV, sampling):
    jax.debug.callback(logits.append, logit_BTV[:, 0], ordered=True)
    return shape(logit_BTV, sampling)

  monkeypatch.setattr(sample, 'shape', spy)
  policy = language_model.policy(case.config, response_length=STEPS)
  group_size, lengths = 3, [9, 1, 5]
  act = jax.jit(
    lambda prompt, key_B: policy.act(
      case.params, prompt, key_B, group_size=group_size
    )
  )
  for padding in 'left', 'right':
    logits.clear()
    prompt = repeat(prompts(case.config, lengths, padding), group_size)
    x = jax.block_until_ready(act(prompt, keys(group_size * len(lengths))))
    jax.effects_barrier()
    action = torch.tensor(np.asarray(x.action)).long()
    left = repeat(prompts(case.config, lengths), group_size)
    want = decode(case.torch, left, action)
    got = np.stack([np.asarray(step) for step in logits], 1)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    logp = torch.log_softmax(torch.tensor(want), -1)
    logp = logp.gather(-1, action[..., None])[..., 0]
    np.testing.assert_allclose(x.logp, logp, rtol=0, atol=1e-4)


def test_greedy_generation_is_that_of_transformers(case):
  prompt = prompts(case.config, [8, 3, 6, 1, 5])

  def want(stop):
    token, mask = to_torch(prompt)
    token_BT = case.torch.generate(
      input_ids=token,
      attention_mask=mask,
      generation_config=transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=STEPS,
        eos_token_id=stop or None,
        pad_token_id=0,
      ),
    )[:, token.shape[1] :].numpy()
    return np.pad(token_BT, [(0, 0), (0, STEPS - token_BT.shape[1])])

  # A token that ends some rows early and others never.
  endless = want([])
  stop = next(
    int(token)
    for token in np.unique(endless)
    if 0 < (endless[:, :-1] == token).any(1).sum() < 5
    and (endless == token).any(1).sum() < 5
  )
  policy = language_model.policy(
    case.config, response_length=STEPS, stop=(stop,)
  )
  act = jax.jit(functools.partial(policy.act, greedy=True))
  x = act(case.params, prompt, keys(5))
  np.testing.assert_array_equal(x.action, want([stop]))
  assert (want([stop]) != endless).any()
  assert 0 < x.truncated.sum() < 5


def test_log_probabilities_of_given_completions_are_those_of_torch(case):
  rng = np.random.default_rng(0)
  lengths, group_size, T, heat = [6, 2, 9], 2, 11, 0.7
  B = group_size * len(lengths)
  action = rng.integers(0, case.config.V, (B, T))
  prompt = repeat(prompts(case.config, lengths), group_size)
  with torch.no_grad():
    want = torch_reference.logp(
      case.torch, prompt, torch.tensor(action), torch.ones(B, T), heat
    ).numpy()
  policy = language_model.policy(
    case.config, response_length=T, sampling=sample.Sampling(temperature=heat)
  )
  evaluate = jax.jit(
    lambda prompt: policy.evaluate(
      case.params, prompt, jnp.asarray(action), group_size=group_size
    )
  )
  for padding in 'left', 'right':
    prompt = repeat(prompts(case.config, lengths, padding), group_size)
    difference = np.linalg.norm(evaluate(prompt).logp - want)
    assert difference <= 1e-4 * np.linalg.norm(want)


class Seen(NamedTuple):
  """Optimizer state: the gradients of its first two updates."""

  first: Any
  second: Any
  step: Any


def watch(move):
  """An optimizer that records gradients and always updates by `move`.

  The second minibatch is then learned from off-policy: ratios leave one.
  """

  def init(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return Seen(zeros, zeros, jnp.zeros((), jnp.int32))

  def update(gradient, state, params=None):
    del params
    is_first = state.step == 0
    first, second = (
      jax.tree.map(lambda new, old: jnp.where(at, new, old), gradient, old)
      for at, old in ((is_first, state.first), (~is_first, state.second))
    )
    return move, Seen(first, second, state.step + 1)

  return optax.GradientTransformation(init, update)


def noise(params, size, seed):
  leaves, structure = jax.tree.flatten(params)
  rng = np.random.default_rng(seed)
  return structure.unflatten(
    size * rng.normal(size=x.shape).astype(np.float32) for x in leaves
  )


def as_torch(case, params, folder):
  """The model of `case` with our parameters, by way of a file."""
  weights_writer.save(folder, params, decoder_names.NAMES)
  (folder / 'config.json').write_bytes(
    (case.folder / 'config.json').read_bytes()
  )
  return transformers.Qwen2ForCausalLM.from_pretrained(folder).eval()


def compare_gradients(ours, model, folder):
  """Each tensor's gradient, by its Hugging Face name."""
  weights_writer.save(folder, ours, decoder_names.NAMES)
  got = st.load_file(folder / weights.SINGLE)
  want = {name: x.grad for name, x in model.named_parameters()}
  assert got.keys() == want.keys()
  for name, x in want.items():
    assert x.norm() > 0, name
    assert (got[name] - x).norm() <= 1e-4 * x.norm(), name


@pytest.mark.slow
def test_grpo_gradient_is_that_of_torch(case, tmp_path):
  group_size, rows, T, heat = 4, 16, 9, 0.9
  settings = {'clip_low': 0.1, 'clip_high': 0.15, 'kl_coef': 0.05}
  rng, drawn = np.random.default_rng(3), []
  reward = rng.normal(size=rows).astype(np.float32)
  reward[4:8] = 0.5  # A group without advantages.

  def judge(answer, action, mask):
    drawn.extend(torch.tensor(x) for x in (action, mask))
    return base.Verdict(reward, answer)

  def like(answer, action, mask):
    return base.Verdict(answer, answer)

  move = noise(case.params, 0.01, seed=1)
  sampling = sample.Sampling(temperature=heat)
  stop = tuple(range(0, case.config.V, 12))
  grpo = workflows.grpo(
    language_model.policy(
      case.config,
      response_length=T,
      stop=stop,
      sampling=sampling,
      init=lambda key: case.params,
    ),
    stages.Stage(judge, 'reward', host=True, out_shapes=like),
    watch(move),
    group_size=group_size,
    num_minibatches=2,
    **settings,
  )
  state = grpo.init(jax.random.key(0))
  far = jax.tree.map(jnp.add, case.params, noise(case.params, 0.01, seed=2))
  prompt = prompts(case.config, [7, 2, 5, 9])
  state, info = grpo.step(
    state._replace(reference=far),
    base.Problem(prompt, jnp.zeros(len(prompt.token))),
    jax.random.key(7),
  )
  clipped = info['train/clip_fraction'].value()['']
  assert 0.02 < clipped < 0.5, 'the second update should clip some tokens'

  action, mask = drawn[0].long(), drawn[1]
  assert mask.sum(1).unique().numel() > 1
  prompt = repeat(prompt, group_size)
  start = as_torch(case, case.params, tmp_path / 'start')
  moved = as_torch(case, jax.tree.map(jnp.add, case.params, move), tmp_path)
  reference = as_torch(case, far, tmp_path / 'reference')
  with torch.no_grad():
    old, ref = (
      torch_reference.logp(m, prompt, action, mask, heat)
      for m in (start, reference)
    )
  advantage = torch_reference.group_relative(torch.tensor(reward), group_size)
  recorded = state.actor.opt_state
  for model, run, ours in (
    (start, slice(rows // 2), recorded.first),
    (moved, slice(rows // 2, rows), recorded.second),
  ):
    part = jax.tree.map(lambda x: x[run], prompt)
    logp = torch_reference.logp(model, part, action[run], mask[run], heat)
    torch_reference.grpo_loss(
      logp, old[run], ref[run], advantage[run], mask[run], **settings
    ).backward()
    compare_gradients(ours, model, tmp_path / 'gradient')
