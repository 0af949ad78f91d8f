"""Adapters of OpenVLA in PEFT's layout: read, trained, written apart."""

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as st

import stages
from stages import base
from stages.envs import push
from stages.models import adapters
from stages.models import lora as lora_lib
from stages.models.files import torch_file, weights
from stages.vla.openvla import openvla_env, openvla_oft_env, tuning_files
from tests.stages.vla import trunk_lora_test
from tests.stages.vla.openvla import openvla_files_test as plain

folder = trunk_lora_test.folder  # A model in float32, once a module.
RANK, ALPHA = 2, 3
# Words in the names of embeddings, norms and convolutions: PEFT adapts none.
OTHER = 'embed_tokens', 'patch_embed', 'norm', 'pos_embed', 'latent'


@pytest.fixture(scope='module')
def adapter(folder, tmp_path_factory):
  """Adapters of all linear maps, as published fine-tuning has them."""
  rng, tensors = np.random.default_rng(1), {}
  for path in folder.glob('*.safetensors'):
    for name, x in st.load_file(path).items():
      if x.ndim == 2 and not any(word in name for word in OTHER):
        stem = f'{adapters.PREFIX}{name.removesuffix(".weight")}'
        for kind, shape in (
          ('A', (RANK, x.shape[1])),
          ('B', (x.shape[0], RANK)),
        ):
          value = (0.3 * rng.normal(size=shape)).astype(np.float32)
          tensors[f'{stem}.lora_{kind}.weight'] = value
  return write(tmp_path_factory.mktemp('tuned'), tensors)


def write(parent, tensors):
  path = parent / tuning_files.FOLDER
  path.mkdir(parents=True)
  stats = json.dumps(trunk_lora_test.STATS)
  (parent / tuning_files.STATISTICS).write_text(stats)
  st.save_file(tensors, path / adapters.TENSORS, metadata={'format': 'pt'})
  config = {
    'peft_type': 'LORA',
    'base_model_name_or_path': 'openvla/openvla-7b',
    'init_lora_weights': 'gaussian',
    'r': RANK,
    'lora_alpha': ALPHA,
    'target_modules': ['q_proj', 'qkv', 'fc1'],
  }
  (path / adapters.CONFIG).write_text(json.dumps(config))
  return path


def started(folder, adapter, make=openvla_env.pretrained, **settings):
  lora = lora_lib.Lora(adapter=str(adapter)) if adapter else None
  return make(
    push.push(image_size=8),
    checkpoint=str(folder),
    instruction=(1, 5, 7),
    towers=plain.TOWERS,
    lora=lora,
    critic=False,
    **settings,
  )


def scores(policy, params):
  _, obs = push.push(image_size=8).init(jnp.arange(3))
  keys = stages.keys(jax.random.key(1), jnp.arange(3))
  x = jax.jit(policy.act)(params, obs, keys)
  return x.action, jax.jit(policy.evaluate)(params, obs, x.action).logp


def test_an_adapter_of_all_linear_maps_is_read_and_exported_to_the_byte(
  folder, adapter, tmp_path
):
  # The reference: each product is added to its weight, in numpy.
  merged = tmp_path / 'merged'
  tensors, pairs = {}, st.load_file(adapter / adapters.TENSORS)
  for path in folder.glob('*.safetensors'):
    for name, x in st.load_file(path).items():
      stem = f'{adapters.PREFIX}{name.removesuffix(".weight")}'
      if (a := pairs.get(f'{stem}.lora_A.weight')) is not None:
        x = x + ALPHA / RANK * pairs[f'{stem}.lora_B.weight'] @ a
      tensors[name] = x.astype(np.float32)
  merged.mkdir()
  stats = adapter.parent / tuning_files.STATISTICS
  (merged / stats.name).write_bytes(stats.read_bytes())
  for path in folder.iterdir():
    if path.suffix not in ('.safetensors',) and 'index' not in path.name:
      (merged / path.name).write_bytes(path.read_bytes())
  st.save_file(tensors, merged / 'model.safetensors')
  kinds = [name for name in pairs if 'lora_A' in name]
  for part in 'featurizer', 'projector', 'layers.0.self_attn', 'lm_head':
    assert any(part in name for name in kinds), part

  own, reference = started(folder, adapter), started(merged, None)
  params = own.init(jax.random.key(0))
  action, logp = scores(own, params)
  want_action, want = scores(reference, reference.init(jax.random.key(0)))
  np.testing.assert_array_equal(action, want_action)
  np.testing.assert_allclose(logp, want, atol=1e-4)
  # Products outside of the language model's layers are among them.
  layers = {k: x for k, x in pairs.items() if 'layers' in k}
  partly = started(folder, write(tmp_path / 'layers', layers))
  other = scores(partly, partly.init(jax.random.key(0)))[1]
  assert np.abs(np.asarray(other - want)).max() > 1e-2

  out = tmp_path / 'out'
  openvla_env.export(
    out,
    {'policy': params},
    checkpoint=str(folder),
    merge_lora=False,
    adapter=str(adapter),
  )
  assert not [*out.glob('*.safetensors')]
  for name in adapters.TENSORS, adapters.CONFIG:
    got = (out / tuning_files.FOLDER / name).read_bytes()
    assert got == (adapter / name).read_bytes(), name

  # Merged, it is the reference.
  openvla_env.export(
    tmp_path / 'whole',
    {'policy': params},
    checkpoint=str(folder),
    adapter=str(adapter),
    towers=plain.TOWERS,
  )
  read = started(tmp_path / 'whole', None)
  whole = scores(read, read.init(jax.random.key(0)))[1]
  np.testing.assert_allclose(whole, want, atol=1e-4)


def test_a_new_adapter_is_exported_apart_with_heads_and_goes_on(
  folder, tmp_path
):
  settings = {'towers': plain.TOWERS, 'critic': False, 'chunk': 2}
  given = {'norm_stats': trunk_lora_test.STATS, 'new_heads': True}
  new = openvla_oft_env.pretrained(
    None,
    checkpoint=str(folder),
    instruction=(1, 5, 7),
    lora=lora_lib.Lora(rank=2),
    **settings,
    **given,
  )
  params = new.init(jax.random.key(0))
  params[lora_lib.ADAPTER] = jax.tree.map(
    lambda x: x + 0.1 * jax.random.normal(jax.random.key(2), x.shape),
    params[lora_lib.ADAPTER],
  )
  out = tmp_path / 'out'
  openvla_oft_env.export(
    out,
    {'policy': params},
    checkpoint=str(folder),
    merge_lora=False,
    norm_stats=trunk_lora_test.STATS,
  )
  # Statistics, the projector of the state and adapters: all are of the export.
  again = openvla_oft_env.pretrained(
    None,
    checkpoint=str(folder),
    instruction=(1, 5, 7),
    lora=lora_lib.Lora(adapter=str(out / tuning_files.FOLDER)),
    **settings,
  )
  read = again.init(jax.random.key(5))
  for part in lora_lib.ADAPTER, 'state_projector', base.FROZEN:
    jax.tree.map(np.testing.assert_array_equal, read[part], params[part])
  tensors = st.load_file(out / tuning_files.FOLDER / adapters.TENSORS)
  name = 'language_model.model.layers.0.self_attn.q_proj.lora_A.weight'
  assert f'{adapters.PREFIX}{name}' in tensors


def test_adapters_that_do_not_fit_are_refused(folder, adapter, tmp_path):
  def check(name, tensors, message):
    path = write(tmp_path / name, tensors)
    with pytest.raises(weights.CheckpointError, match=message):
      started(folder, path).init(jax.random.key(0))

  given = st.load_file(adapter / adapters.TENSORS)
  of = lambda word: {k: x for k, x in given.items() if word in k}
  check('towers', of('vision'), 'it adapts no layer of the language model')
  wrong = of('projector') | {
    k: x[:, :1] for k, x in of('fc1.lora_A').items() if 'projector' in k
  }
  check(
    'shape', of('layers') | wrong, r'projector.fc1.weight is .* its pair is'
  )
  alone = of('layers') | of('fc2.lora_A')
  check('pair', alone, 'fc2.weight has no pair of matrices')
  extra = {f'{adapters.PREFIX}arm.lora_A.weight': np.ones((2, 2), np.float32)}
  check('extra', of('layers') | extra, 'the model has no arm.weight')
  with pytest.raises(weights.CheckpointError, match='no adapter at'):
    started(folder, tmp_path / 'nothing')


def test_a_head_beside_an_adapter_hides_no_other_head_of_the_model(tmp_path):
  model, tuned = tmp_path / 'model', tmp_path / 'tuned'
  for parent, heads in (
    (model, {'proprio_projector': 1.0, 'action_head': 2.0}),
    (tuned, {'proprio_projector': 3.0}),
  ):
    parent.mkdir()
    for name, x in heads.items():
      tensors = {'fc1.weight': np.full((2, 2), x, np.float32)}
      torch_file.write(parent / f'{name}--5_checkpoint.pt', tensors)
  write(tuned, {})
  found = tuning_files.heads(model, str(tuned / tuning_files.FOLDER))
  values = {part: x.tensors['fc1.weight'].max() for part, x in found.items()}
  assert values == {'state_projector': 3.0, 'l1_head': 2.0}


def test_a_part_of_a_weight_with_an_adapter_is_that_of_the_whole(
  folder, adapter
):
  with contextlib.ExitStack() as stack:
    files = weights.TensorFiles(folder, stack)
    both = tuning_files.add(files, str(adapter), frozenset())
    name = sorted(both.adapters)[0]
    stored, (down, up) = files.slice(name)[:], both.adapters[name]
    whole, part = stored + up @ down, both.slice(name)
    for index in np.s_[:], np.s_[1:3], np.s_[1:3, :2], np.s_[:2,]:
      np.testing.assert_allclose(
        part[index], whole[index], rtol=1e-6, atol=1e-6
      )
