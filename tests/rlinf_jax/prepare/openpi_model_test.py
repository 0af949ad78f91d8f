"""Checkpoints of openpi in JAX: their layout, and what their models compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import openpi_reference
from rlinf_jax.prepare import openpi_model
from stages.models.files import weights
from stages.vla import normalization
from stages.vla.pi0 import pi0, pi0_files, pi0_openpi

B = 2
STATS = {'state': {'mean': [0.0], 'std': [1.0]}}
both = pytest.mark.parametrize('adaptive', [False, True], ids=['pi0', 'pi05'])


def save(folder, tree):
  import orbax.checkpoint as ocp

  with ocp.PyTreeCheckpointer() as checkpointer:
    checkpointer.save(folder / 'params', {'params': tree})
  return str(folder)


@pytest.mark.parametrize(
  ('adaptive', 'adapted'),
  [(False, False), (True, False), (False, True)],
  ids=['pi0', 'pi05', 'pi0_lora'],
)
def test_velocities_are_those_of_openpis_equations(adaptive, adapted, tmp_path):
  reference = openpi_reference
  tree, config = reference.tree(adaptive), reference.config(adaptive)
  if adapted:
    tree = reference.with_adapters(tree)
  checkpoint = save(tmp_path / 'jax', tree)
  normalization.write(checkpoint, 'lab/robot', STATS)
  out = tmp_path / 'out'
  openpi_model.convert(checkpoint, str(out), config)
  assert normalization.read(out, 'lab/robot') == STATS
  params = pi0_files.read(out, config)
  rng = np.random.default_rng(1)
  real = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  image = real(B, reference.IMAGE, reference.IMAGE, 3)
  token = jnp.asarray(rng.integers(0, reference.V, (B, 5)))
  is_token = jnp.arange(5)[None] < jnp.array([[5], [3]])
  state, x = real(B, reference.O), real(B, reference.Z, reference.A)
  t = jnp.array([0.3, 0.9])
  with jax.numpy_rank_promotion('allow'):  # Of flax's own layers.
    want = reference.velocity(
      tree, adaptive, image, token, is_token, state, x, t
    )
    seen = reference.embed_image(tree, image)
  got = pi0.embed_images(config, params, image)
  np.testing.assert_allclose(got, seen, atol=1e-4)
  words = pi0.embed_tokens(config, params, token)
  mask = jnp.concatenate([jnp.ones(got.shape[:2], bool), is_token], axis=1)
  prefix = pi0.encode(
    config, params, jnp.concatenate([got, words], axis=1), mask
  )
  own = pi0.velocity(config, params, prefix, state, x, t)
  np.testing.assert_allclose(own, want, atol=1e-4)


def test_arrays_that_training_has_written_end_in_value(tmp_path):
  tree, config = openpi_reference.tree(False), openpi_reference.config(False)
  wrapped = jax.tree.map(lambda x: {'value': x}, tree)
  for name, x in (('plain', tree), ('wrapped', wrapped)):
    openpi_model.convert(
      save(tmp_path / name, x), str(tmp_path / f'{name}_out'), config
    )
  one, two = (
    pi0_files.read(tmp_path / f'{name}_out', config)
    for name in ('plain', 'wrapped')
  )
  jax.tree.map(np.testing.assert_array_equal, one, two)


@both
def test_a_checkpoint_is_written_back_byte_for_byte(adaptive, tmp_path):
  tree = openpi_reference.tree(adaptive)
  config = openpi_reference.config(adaptive)
  folders = [str(tmp_path / name) for name in ('jax', 'torch', 'back')]
  save(tmp_path / 'jax', tree)
  normalization.write(folders[0], 'lab/robot', STATS)
  openpi_model.convert(*folders[:2], config)
  assert pi0_files.is_adaptive(folders[1]) == adaptive
  openpi_model.convert_back(*folders[1:], config)
  again = openpi_model.read(folders[2])
  assert jax.tree.structure(again) == jax.tree.structure(tree)
  for want, got in zip(*map(jax.tree.leaves, (tree, again)), strict=True):
    assert want.dtype == got.dtype and want.tobytes() == got.tobytes()
  assert normalization.read(folders[2], 'lab/robot') == STATS
  with pytest.raises(FileExistsError, match='name a new folder'):
    openpi_model.convert_back(*folders[1:], config)


@pytest.mark.parametrize(
  ('fault', 'message'),
  [
    (lambda p: p.pop('lora_b'), 'lora_b are not all there'),
    (lambda p: p.pop('w'), 'q_einsum/w, .* are not all there'),
    (
      lambda p: p.update(lora_b=p['lora_b'][..., :2, :]),
      r"are \[2, 4, 12, 3\] and \[2, 4, 2, 6\], expected .*'rank', 6\]",
    ),
  ],
  ids=['no partner', 'no matrix', 'another rank'],
)
def test_adapters_that_do_not_fit_are_refused(fault, message):
  config = openpi_reference.config(False)
  tree = openpi_reference.with_adapters(openpi_reference.tree(False))
  fault(tree['PaliGemma']['llm']['layers']['attn']['q_einsum'])
  with pytest.raises(weights.CheckpointError, match=message):
    pi0_openpi.params(config, tree)


def test_a_checkpoint_of_another_kind_is_refused(tmp_path):
  config = openpi_reference.config(False)
  with pytest.raises(weights.CheckpointError, match="has no folder 'params'"):
    openpi_model.convert(str(tmp_path), str(tmp_path / 'out'), config)
  (tmp_path / 'empty' / 'params').mkdir(parents=True)
  with pytest.raises(weights.CheckpointError, match='orbax cannot read'):
    openpi_model.convert(str(tmp_path / 'empty'), str(tmp_path / 'out'), config)
  other = save(tmp_path / 'other', openpi_reference.tree(True))
  with pytest.raises(
    weights.CheckpointError, match='missing .*state_proj.*extra time_mlp_in'
  ):
    openpi_model.convert(other, str(tmp_path / 'out'), config)
  tree = openpi_reference.tree(False)
  tree['state_proj']['kernel'] = np.zeros((3, 8), np.float32)
  path = save(tmp_path / 'small', tree)
  with pytest.raises(
    weights.CheckpointError, match=r'kernel is \[3, 8\], expected \[4, 8\]'
  ):
    openpi_model.convert(path, str(tmp_path / 'out'), config)
  assert not (tmp_path / 'out').exists()
  (tmp_path / 'out').mkdir()
  with pytest.raises(FileExistsError, match='name a new folder'):
    openpi_model.convert(path, str(tmp_path / 'out'), config)
