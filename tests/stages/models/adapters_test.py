"""Adapters in PEFT's format: parity with `peft`, round trips and refusals."""

import json
import shutil
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as st
import transformers

from stages import base
from stages.language import huggingface
from stages.models import lora, transformer
from stages.models.files import lazy_array, weights
import torch_reference
from torch_reference import prompts, to_torch

torch = torch_reference.torch
LLAMA = {
  'hidden_size': 20,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 6,
  'intermediate_size': 29,
  'vocab_size': 53,
  'num_hidden_layers': 3,
}
KEY = jax.random.key(0)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  """A small model and its folder."""
  folder = tmp_path_factory.mktemp('model') / 'base'
  made = torch_reference.dressed(LLAMA, 0, 'llama')
  made.save_pretrained(folder)
  return made, folder


@pytest.fixture(scope='module')
def trained(model):
  """Parameters of an adapted policy after some training."""
  settings = lora.Lora(rank=3, alpha=7, targets='qkvogud')
  policy = huggingface.policy(str(model[1]), response_length=4, lora=settings)
  params, rng = policy.init(KEY), np.random.default_rng(0)
  adapter = jax.tree.map(
    lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), jnp.float32),
    params[lora.ADAPTER],
  )
  return params | {lora.ADAPTER: adapter}


@pytest.fixture(scope='module')
def adapter(model, trained, tmp_path_factory):
  """The folder of those adapters, as we write them."""
  folder = tmp_path_factory.mktemp('export') / 'adapter'
  huggingface.export(folder, trained, model[1])
  return folder


def logits(folder, params, prompt):
  network = transformer.Transformer(huggingface.load_config(folder))
  return np.asarray(jax.jit(network.apply)({'params': params}, *prompt))


def assert_close(got, want, prompt, atol=1e-4):
  real = np.asarray(prompt.mask) > 0
  np.testing.assert_allclose(got[real], want[real], rtol=0, atol=atol)
  assert np.abs(want[real]).max() > 1


def prompt_of(folder):
  return prompts(huggingface.load_config(folder), [11, 7, 1, 4])


@pytest.mark.parametrize(
  'kind, targets, rslora',
  [
    ('llama', ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'down_proj'], False),
    ('qwen3', ['q_proj', 'o_proj', 'gate_proj', 'up_proj'], True),
  ],
)
def test_an_adapter_of_peft_gives_the_logits_of_peft(
  kind, targets, rslora, tmp_path
):
  import peft  # Takes seconds: not where all tests are collected.

  reference = torch_reference.dressed(LLAMA, 1, kind)
  reference.save_pretrained(tmp_path / 'base')
  adapted = peft.get_peft_model(
    reference,
    peft.LoraConfig(
      r=3,
      lora_alpha=7,
      target_modules=targets,
      use_rslora=rslora,
      task_type='CAUSAL_LM',
    ),
  )
  with torch.no_grad():
    for name, x in adapted.named_parameters():
      if 'lora_' in name:
        x.normal_(std=0.3)
  adapted.save_pretrained(tmp_path / 'adapter')
  settings = lora.Lora(adapter=str(tmp_path / 'adapter'))
  base = str(tmp_path / 'base')
  policy = huggingface.policy(base, response_length=4, lora=settings)
  params, prompt = policy.init(KEY), prompt_of(base)
  with torch.no_grad():
    want = torch_reference.logits(adapted, *to_torch(prompt)).numpy()
    with adapted.disable_adapter():
      without = torch_reference.logits(adapted, *to_torch(prompt)).numpy()
  assert np.abs(want - without).max() > 0.1
  assert_close(logits(base, lora.join(params), prompt), want, prompt)
  assert_close(logits(base, lora.merge(params), prompt), want, prompt)

  huggingface.export(tmp_path / 'again', params, base)
  before, after = (
    st.load_file(tmp_path / name / 'adapter_model.safetensors')
    for name in ('adapter', 'again')
  )
  assert before.keys() == after.keys()
  assert all(np.array_equal(before[k], after[k]) for k in before)


def test_peft_reads_what_is_exported(model, trained, adapter):
  import peft

  fresh = torch_reference.dressed(LLAMA, 0, 'llama')
  adapted = peft.PeftModel.from_pretrained(fresh, adapter).eval()
  prompt = prompt_of(model[1])
  with torch.no_grad():
    want = torch_reference.logits(adapted, *to_torch(prompt)).numpy()
  assert_close(logits(model[1], lora.join(trained), prompt), want, prompt)


def test_a_merged_export_has_the_same_logits(model, trained, tmp_path):
  huggingface.export(tmp_path / 'merged', trained, model[1], merge_lora=True)
  prompt = prompt_of(model[1])
  got = logits(model[1], lora.join(trained), prompt)
  config = huggingface.load_config(tmp_path / 'merged')
  params = huggingface.load_params(tmp_path / 'merged', config)
  assert_close(logits(model[1], params, prompt), got, prompt, atol=2e-5)
  merged = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'merged'
  )
  with torch.no_grad():
    theirs = torch_reference.logits(merged, *to_torch(prompt)).numpy()
  assert_close(theirs, got, prompt)


@pytest.mark.parametrize('quantize', [None, 'int8'])
def test_a_merged_export_holds_the_arrays_of_one_matrix(
  quantize, model, trained, tmp_path
):
  if quantize:
    settings = lora.Lora(rank=3, quantize=quantize)
    frozen = trained[base.FROZEN]
    own = lora.quantized(frozen[lora.PARAMS], settings)
    trained = trained | {base.FROZEN: frozen | {lora.PARAMS: own}}
  # The whole model, merged by one program, as a checkpoint.
  whole = jax.jit(lora.merge)(trained)
  huggingface.export(tmp_path / 'whole', whole, model[1])
  matrices, alive, most = {*lora.LETTERS.values()}, [], []

  def lazy(path, x):
    name = path[-1].key
    matrix = any(name in (p, *lora.pair_names(p)) for p in matrices)

    def read():
      copy = np.array(x)
      if matrix:
        alive.append(weakref.ref(copy))
        most.append(sum(found() is not None for found in alive))
      return copy

    return lazy_array.LazyArray(x.shape, x.dtype, read) if x.ndim else x

  params = jax.tree_util.tree_map_with_path(lazy, trained)
  huggingface.export(tmp_path / 'merged', params, model[1], merge_lora=True)
  # The matrix, its A and its B, each once.
  assert len(most) == 3 * len(matrices) and max(most) <= 3
  files = [
    (tmp_path / name / 'model.safetensors').read_bytes()
    for name in ('whole', 'merged')
  ]
  assert files[0] == files[1]


def test_an_export_is_read_back_to_the_bit(model, trained, adapter):
  settings = lora.Lora(adapter=str(adapter), rank=3, targets='qkvogud')
  policy = huggingface.policy(str(model[1]), response_length=4, lora=settings)
  params = policy.init(KEY)
  got, want = (jax.tree.leaves_with_path(x) for x in (params, trained))
  for (path, a), (_, b) in zip(got, want, strict=True):
    np.testing.assert_array_equal(a, b, err_msg=str(path))
  config = json.loads((adapter / 'adapter_config.json').read_text())
  assert (config['r'], config['lora_alpha']) == (3, 7)
  assert config['base_model_name_or_path'] == str(model[1])


def test_frozen_weights_have_the_type_of_the_arithmetic(model):
  settings = lora.Lora(rank=2)
  for dtype in 'bfloat16', 'float32':
    policy = huggingface.policy(
      str(model[1]), response_length=4, dtype=dtype, lora=settings
    )
    params = policy.init(KEY)
    frozen = params['frozen'][lora.PARAMS]['layers']
    assert frozen['query_DHW'].dtype == dtype
    assert frozen['before_attention_D'].dtype == 'float32'
    adapter = params[lora.ADAPTER]['layers']
    assert {x.dtype.name for x in adapter.values()} == {'float32'}
    prompt = prompt_of(model[1])
    x = policy.act(params, prompt, torch_reference.keys(4))
    whole = huggingface.policy(str(model[1]), response_length=4, dtype=dtype)
    y = whole.act(whole.init(KEY), prompt, torch_reference.keys(4))
    np.testing.assert_array_equal(x.logp, y.logp)


def refused(folder, settings, match):
  with pytest.raises(weights.CheckpointError, match=match) as error:
    huggingface.policy(str(folder), response_length=4, lora=settings)
  return str(error.value)


def test_an_adapter_of_another_model_is_one_sentence(adapter, tmp_path):
  other = LLAMA | {'hidden_size': 24, 'num_hidden_layers': 2}
  torch_reference.dressed(other, 0, 'llama').save_pretrained(tmp_path)
  said = refused(tmp_path, lora.Lora(adapter=str(adapter)), 'does not fit')
  for part in (
    'self_attn.q_proj.lora_A of layers 0–1 is [3, 20], expected [3, 24]',
    'self_attn.o_proj.lora_B of layers 0–1 is [20, 3], expected [24, 3]',
    'self_attn.q_proj.lora_A of layer 2 is not adapted in this model',
    'mlp.down_proj.lora_B of layers 0–1',
  ):
    assert part in said, said
  # Tensors that fit are not listed: the heads are as wide.
  assert 'q_proj.lora_B of layers 0–1' not in said


def test_an_adapter_of_other_settings_is_one_sentence(model, adapter):
  settings = lora.Lora(adapter=str(adapter), rank=8, alpha=1.0, targets='qv')
  said = refused(model[1], settings, 'its rank is 3, and 8 is asked for')
  assert 'its alpha is 7, and 1 is asked for' in said
  assert 'and q_proj, v_proj are asked for' in said


@pytest.mark.parametrize(
  'change, match',
  [
    ({'use_dora': True, 'bias': 'all'}, "sets bias 'all' and use_dora True"),
    ({'peft_type': 'IA3'}, "sets peft_type 'IA3'"),
    ({'r': None}, 'is not the configuration of a LoRA adapter'),
    ({'rank_pattern': {'q_proj': 8}}, 'sets rank_pattern'),
    ({'init_lora_weights': 'pissa_niter_16'}, "sets init_lora_weights 'pissa"),
    ({'init_lora_weights': 'olora'}, "sets init_lora_weights 'olora'"),
    ({'alora_invocation_tokens': [5]}, r'sets alora_invocation_tokens \[5\]'),
    (
      {'use_qalora': True, 'x_config': {'a': 1}},
      'use_qalora True and x_config',
    ),
  ],
)
def test_unsupported_adapters_are_refused(
  model, adapter, change, match, tmp_path
):
  shutil.copytree(adapter, tmp_path / 'adapter')
  path = tmp_path / 'adapter/adapter_config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | change))
  refused(model[1], lora.Lora(adapter=str(tmp_path / 'adapter')), match)


def test_settings_that_do_not_change_the_model_are_allowed(
  model, adapter, tmp_path
):
  shutil.copytree(adapter, tmp_path / 'adapter')
  path = tmp_path / 'adapter/adapter_config.json'
  config = json.loads(path.read_text()) | {
    'peft_version': '0.21.2',
    'megatron_core': 'megatron.core',
    'qalora_group_size': 16,
    'runtime_config': {'ephemeral_gpu_offload': False},
    'alora_invocation_tokens': None,
    'newer_option': False,
  }
  for start in (True, False, 'gaussian', 'orthogonal', 'eva'):
    path.write_text(json.dumps(config | {'init_lora_weights': start}))
    settings = lora.Lora(adapter=str(tmp_path / 'adapter'))
    huggingface.policy(str(model[1]), response_length=4, lora=settings)


def test_absent_and_broken_adapters_are_refused(model, adapter, tmp_path):
  settings = lora.Lora(adapter=str(tmp_path))
  refused(model[1], settings, 'There is no adapter at')
  shutil.copy(adapter / 'adapter_config.json', tmp_path)
  (tmp_path / 'adapter_model.safetensors').write_text('no tensors')
  refused(model[1], settings, 'cannot be read')
  # An adapter in the place of a model says what it is.
  refused(adapter, None, 'holds an adapter of PEFT, not a model')


def test_experts_have_no_adapters(tmp_path):
  sizes = LLAMA | {
    'num_experts': 4,
    'num_experts_per_tok': 2,
    'moe_intermediate_size': 12,
  }
  torch_reference.dressed(sizes, 0, 'qwen3_moe').save_pretrained(tmp_path)
  with pytest.raises(ValueError, match='cannot adapt gate_proj, up_proj, down'):
    huggingface.policy(str(tmp_path), response_length=4, lora=lora.Lora(rank=2))
  settings = lora.Lora(rank=2, targets='qkvo')
  policy = huggingface.policy(str(tmp_path), response_length=4, lora=settings)
  assert len(policy.init(KEY)[lora.ADAPTER]['layers']) == 8
