"""vLLM generates with the parameters that it was sent last."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import claims
from rlinf_jax.engines import vllm_engine, vllm_instance, vllm_memory
from stages import base
from stages.language import huggingface, sample, stops
from stages.language.decoding import stop_texts
from stages.models import lora
import tiny
import vllm_models

pytestmark = vllm_models.marks
torch_reference = vllm_models.torch_reference
torch = torch_reference.torch
# For tests of what is sent, which differs. All else is independent of it.
with_both = pytest.mark.parametrize('case', ['tied', 'untied'], indirect=True)


def test_after_every_update_log_probs_equal_those_of_transformers(
  case, tmp_path
):
  policy, prompt, compared = case.policy(), vllm_models.prompts(), []
  for seed in range(1, 6):
    model = vllm_models.reference(case.sizes, seed)
    model.save_pretrained(tmp_path / str(seed))
    config = huggingface.load_config(tmp_path / str(seed))
    params = huggingface.load_params(tmp_path / str(seed), config)
    x = vllm_models.act(policy, params, prompt)
    with torch.no_grad():
      want = torch_reference.logp(
        model,
        prompt,
        torch.tensor(np.array(x.action)).long(),
        torch.tensor(np.array(x.mask)),
      ).numpy()
    vllm_models.assert_close_where_real(x.logp, want, x.mask)
    compared.append(np.asarray(x.action).tobytes())
  assert len(set(compared)) == 5


@pytest.mark.parametrize(
  ('model_type', 'settings'),
  [
    ('qwen3', {'tie_word_embeddings': False}),
    ('gemma2', {'query_pre_attn_scalar': 9, 'sliding_window': 4}),
  ],
)
def test_other_architectures_have_the_log_probs_of_transformers(
  model_type, settings, tmp_path
):
  sizes = vllm_models.SIZES | {'head_dim': 64, 'pad_token_id': None} | settings
  model = torch_reference.dressed(sizes, 0, model_type)
  # The embedding of Gemma is multiplied by √D, and its output layer is tied.
  model.model.embed_tokens.weight.data *= 0.1
  model.save_pretrained(tmp_path)
  case = vllm_models.Case(sizes, str(tmp_path))
  prompt, config = vllm_models.prompts(), huggingface.load_config(tmp_path)
  params = huggingface.load_params(tmp_path, config)
  x = vllm_models.act(case.policy(), params, prompt)
  with torch.no_grad():
    want = torch_reference.logp(
      model,
      prompt,
      torch.tensor(np.array(x.action)).long(),
      torch.tensor(np.array(x.mask)),
    ).numpy()
  vllm_models.assert_close_where_real(x.logp, want, x.mask)
  assert np.abs(want).max() > 1


SAMPLINGS = [
  sample.Sampling(temperature=0.6),
  sample.Sampling(temperature=1.7, top_k=5),
  sample.Sampling(temperature=0.8, top_p=0.7),
  sample.Sampling(temperature=1.2, top_k=20, top_p=0.9),
  sample.Sampling(top_k=1000),
]


@pytest.mark.parametrize(
  'sampling', claims.some(SAMPLINGS, keep=SAMPLINGS[3:]), ids=str
)
def test_log_probs_are_of_the_distribution_that_is_evaluated(case, sampling):
  policy, prompt = case.policy(sampling=sampling), vllm_models.prompts()
  params = policy.init(jax.random.key(0))
  x = vllm_models.act(policy, params, prompt)
  want = policy.evaluate(
    params, prompt, jnp.asarray(x.action), group_size=vllm_models.GROUP
  )
  vllm_models.assert_close_where_real(x.logp, want.logp, x.mask)
  bare = case.policy().evaluate(
    params, prompt, x.action, group_size=vllm_models.GROUP
  )
  if sampling.top_k != 1000:
    assert np.abs(np.asarray(bare.logp - want.logp) * x.mask).max() > 0.1


def test_nothing_is_compiled_although_torch_was_imported_before(case):
  import torch._dynamo.utils

  params = case.policy().init(jax.random.key(0))
  vllm_models.act(case.policy(), params, vllm_models.prompts())
  assert not torch._dynamo.utils.counters['frames']


@with_both
def test_greedy_completions_equal_those_of_the_model(case):
  policy, own = case.policy(), case.policy(engine=None)
  params, prompt = policy.init(jax.random.key(0)), vllm_models.prompts(32)
  got = vllm_models.act(policy, params, prompt, greedy=True)
  want = vllm_models.act(own, params, prompt, greedy=True)
  for name in ('action', 'mask', 'truncated', 'version'):
    one, other = (np.asarray(getattr(x, name)) for x in (got, want))
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one, other, err_msg=name)
  vllm_models.assert_close_where_real(got.logp, want.logp, got.mask)
  assert {0.0, 1.0} == set(np.asarray(got.truncated))
  assert len(set(np.asarray(got.mask).sum(1))) > 2


def test_texts_end_the_completions_of_the_model_at_the_same_tokens(
  case, monkeypatch
):
  letters = [b'abc'[i % 3 : i % 3 + 1] for i in range(case.sizes['vocab_size'])]
  found = stop_texts.make(('aca', 'bb'), letters)
  monkeypatch.setattr(stops, 'automaton', lambda *given: found)
  policy, own = case.policy(), case.policy(engine=None)
  params, prompt = policy.init(jax.random.key(0)), vllm_models.prompts(32)
  got = vllm_models.act(policy, params, prompt, greedy=True)
  want = vllm_models.act(own, params, prompt, greedy=True)
  monkeypatch.setattr(stops, 'automaton', lambda *given: None)
  whole = vllm_models.act(case.policy(), params, prompt, greedy=True)
  for name in ('action', 'mask', 'truncated'):
    np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
  assert np.asarray(got.mask).sum() < 0.8 * np.asarray(whole.mask).sum()
  # A text may have begun before a completion was interrupted.
  kept = (np.arange(vllm_models.LENGTH) < 3) * np.asarray(want.mask)
  draft = base.Completions(
    *(np.asarray(x) * kept for x in (want.action, want.logp)),
    kept,
    (np.asarray(want.truncated) > 0) | (np.asarray(want.mask).sum(1) > 3),
  )
  draft = draft._replace(action=draft.action.astype(np.int32))
  keys = jax.random.split(jax.random.key(0), 32)
  again = policy.resume(params, prompt, keys, draft, greedy=True).result()
  np.testing.assert_array_equal(again.action, want.action)
  np.testing.assert_array_equal(again.alive, np.asarray(want.truncated) > 0)


def test_frequencies_are_those_of_the_model(case):
  """Compares those of first tokens with the softmax of the model."""
  policy = case.policy(response_length=1)
  params, rows = policy.init(jax.random.key(0)), 2048
  prompt = jax.tree.map(
    lambda x: jnp.repeat(x[:1], rows, axis=0), vllm_models.prompts(2)
  )
  x = vllm_models.act(policy, params, prompt)
  V = case.sizes['vocab_size']
  every = jax.tree.map(lambda x: x[:V], prompt)
  logp = policy.evaluate(params, every, jnp.arange(V)[:, None]).logp[:, 0]
  share = np.bincount(np.asarray(x.action)[:, 0], minlength=V) / rows
  p = np.exp(np.asarray(logp))
  # Six standard deviations of a frequency in this many samples.
  assert (np.abs(share - p) <= 6 * np.sqrt(p * (1 - p) / rows) + 1e-9).all()


def test_samples_of_a_row_depend_on_its_key_alone(case):
  policy, prompt = case.policy(), vllm_models.prompts()
  params = policy.init(jax.random.key(0))
  one, again, other = (
    vllm_models.act(policy, params, prompt, i) for i in (1, 1, 2)
  )
  tiny.assert_same_bits(one, again)
  assert (np.asarray(one.action) != np.asarray(other.action)).any(
    1
  ).mean() > 0.8
  # Rows of a group share a prompt, but not their samples.
  assert (np.asarray(one.action[0]) != np.asarray(one.action[1])).any()


def test_keys_and_values_of_as_many_rows_as_are_decoded_at_once_fit(case):
  policy = case.policy()
  params = policy.init(jax.random.key(0))
  vllm_models.act(policy, params, vllm_models.prompts())
  settings = vllm_engine.get(case.settings).llm.vllm_config.cache_config
  # A row takes a block of 128 tokens, and vLLM leaves one empty.
  assert settings.block_size == vllm_memory.BLOCK
  assert settings.num_gpu_blocks == vllm_models.ENGINE['max_num_seqs'] + 1


def test_parameters_are_sent_only_when_they_change(case):
  policy, prompt = case.policy(), vllm_models.prompts()
  engine = vllm_engine.get(case.settings)
  params = policy.init(jax.random.key(0))
  vllm_models.act(policy, params, prompt)
  before = engine.weight_version
  vllm_models.act(policy, params, prompt)
  vllm_models.act(policy, jax.tree.map(lambda x: x, params), prompt)
  assert engine.weight_version == before
  same = vllm_models.act(policy, jax.tree.map(jnp.copy, params), prompt)
  assert engine.weight_version == before + 1
  tiny.assert_same_bits(same, vllm_models.act(policy, params, prompt))


def test_of_an_adapted_model_the_adapter_alone_is_sent_again(case, monkeypatch):
  policy, prompt = case.policy(lora=lora.Lora(rank=4)), vllm_models.prompts(32)
  merged, own = case.policy(), case.policy(engine=None, lora=lora.Lora(rank=4))
  settings = dataclasses.replace(case.settings, lora_rank=4)
  engine, sent = vllm_engine.get(settings), []
  send = vllm_instance.Instance._send_weights

  def counted(instance, *args):
    sent.append(instance)
    return send(instance, *args)

  monkeypatch.setattr(vllm_instance.Instance, '_send_weights', counted)
  params, seen = policy.init(jax.random.key(0)), []
  for seed in range(3):
    x = vllm_models.act(policy, params, prompt, greedy=True)
    vllm_models.act(policy, params, prompt, seed=1)
    assert engine.weight_version == seed + 1 and len(sent) == 1
    whole = jax.jit(lora.merge)(params)
    for other, known in ((own, params), (merged, whole)):
      want = vllm_models.act(other, known, prompt, greedy=True)
      np.testing.assert_array_equal(x.action, want.action)
      vllm_models.assert_close_where_real(x.logp, want.logp, x.mask)
    del sent[1:]  # Of the merged model.
    seen.append(np.asarray(x.action).tobytes())
    noise = jax.random.key(seed)
    adapter = jax.tree.map(
      lambda x: x + 0.1 * jax.random.normal(noise, x.shape),
      params[lora.ADAPTER],
    )
    params = params | {lora.ADAPTER: adapter}
  assert len(set(seen)) == 3
  engine.close()
