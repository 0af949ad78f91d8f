"""Masks, caches and files of π0 and π0.5."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as st

from stages.models.files import weights
from stages.models.layers import attention
from stages.models.vision import vit
from stages.vla import instructions
from stages.vla.pi0 import pi0, pi0_files

B, P = 2, 7
CONFIG = pi0.Config(
  vit.Config(image_size=28, patch_size=14, D=6, L=2, H=2, F=8, dtype='float64'),
  pi0.GEMMA(V=40, D=32, L=2, H=4, K=2, W=8, F=40, dtype='float64'),
  pi0.GEMMA(V=1, D=24, L=2, H=4, K=2, W=8, F=40, dtype='float64'),
  Z=5,
  A=4,
  O=6,
)
CONFIGS = {
  'pi0': CONFIG,
  'pi05': dataclasses.replace(CONFIG, adaptive=True),
}
both = pytest.mark.parametrize('config', CONFIGS.values(), ids=CONFIGS)

pytestmark = pytest.mark.usefixtures('in_float64')


def random_params(config):
  leaves, tree = jax.tree.flatten(pi0.param_shapes(config))
  rng = np.random.default_rng(0)
  return jax.tree.unflatten(
    tree, [jnp.asarray(0.2 * rng.normal(size=x.shape)) for x in leaves]
  )


def inputs(config):
  """Embeddings and mask of a prefix, state, noisy actions and time."""
  rng = np.random.default_rng(1)
  mask = np.ones((B, P), bool)
  mask[0, 2:4] = mask[1, 6:] = False  # An absent image; padding.
  return (
    jnp.asarray(rng.normal(size=(B, P, config.trunk.D))),
    jnp.asarray(mask),
    jnp.asarray(rng.normal(size=(B, config.O))),
    jnp.asarray(rng.normal(size=(B, config.Z, config.A))),
    jnp.array([0.3, 0.9]),
  )


def predict(config, params, x_BPD, mask_BP, *rest):
  prefix = pi0.encode(config, params, x_BPD, mask_BP)
  return pi0.velocity(config, params, prefix, *rest)


@both
def test_velocities_read_all_but_what_is_masked(config):
  params, given = random_params(config), inputs(config)
  x_BPD, mask_BP, state, x, t = given
  run = jax.jit(lambda *given: predict(config, params, *given))
  want = run(*given)
  assert want.shape == x.shape
  absent = jnp.where(mask_BP[..., None], x_BPD, 9.0)
  np.testing.assert_allclose(run(absent, *given[1:]), want, rtol=1e-9)
  changed = {
    'prefix': run(x_BPD.at[:, 0, 0].add(0.1), *given[1:]),
    'state': run(x_BPD, mask_BP, state + 0.1, x, t),
    'time': run(x_BPD, mask_BP, state, x, t + 0.01),
    'last action': run(x_BPD, mask_BP, state, x.at[:, -1].add(0.1), t),
  }
  for name, other in changed.items():
    moved = np.abs(other - want).max(2)
    if name == 'state' and config.adaptive:
      assert (moved == 0).all()
    else:  # Every action, also the first: attention is in both directions.
      assert (moved > 1e-6).all(), name


@both
def test_a_row_does_not_depend_on_padding_or_on_other_rows(config):
  params = random_params(config)
  x_BPD, mask_BP, state, x, t = inputs(config)
  want = predict(config, params, x_BPD, mask_BP, state, x, t)
  kept = np.flatnonzero(mask_BP[0])
  alone = predict(
    config, params, x_BPD[:1, kept], mask_BP[:1, kept], state[:1], x[:1], t[:1]
  )
  np.testing.assert_allclose(alone, want[:1], rtol=1e-8, atol=1e-10)


def test_the_state_of_pi0_does_not_attend_to_actions():
  """Of a prefix of two tokens, the state and three actions."""
  mask = attention.Mask(jnp.ones((1, 6), bool), pi0._state_first(1, 2, 4))
  of_state, of_action = [1, 1, 1, 0, 0, 0], [1] * 6
  want = [of_state, of_action, of_action, of_action]
  np.testing.assert_array_equal(mask.dense(4)[0], np.array(want, bool))


def test_trunk_and_expert_of_unequal_heads_are_refused():
  with pytest.raises(ValueError, match='K must be equal, and is 2 of the tru'):
    dataclasses.replace(CONFIG, expert=dataclasses.replace(CONFIG.expert, K=4))


def test_published_sizes_are_those_of_the_paper():
  shapes = pi0.param_shapes(pi0.published())
  count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
  # "300M" and Gemma 2B, which has 2.5 billion with its embedding.
  assert 300e6 < count(shapes['expert']) < 320e6
  assert 2.4e9 < count(shapes['trunk']) < 2.6e9


def test_the_state_of_pi05_is_written_in_bins():
  text = instructions.pi05_text(
    ' pick_up\nthe cup ', np.array([-1.5, -1.0, 0.0, 0.995, 1])
  )
  want = 'Task: pick up the cup, State: -1 0 128 255 255;\nAction: '
  assert text == want


@both
@pytest.mark.parametrize(
  'layout',
  [
    pi0_files.Layout(),
    pi0_files.Layout('', '', pi0_files.EMBEDDINGS[1]),
  ],
  ids=['lerobot', 'openpi'],
)
def test_checkpoints_are_read_and_written_tensor_by_tensor(
  config, layout, tmp_path
):
  params = jax.tree.map(lambda x: x.astype(jnp.float32), random_params(config))
  pi0_files.write(tmp_path / 'one', params, config, layout=layout)
  stored = st.load_file(tmp_path / 'one' / 'model.safetensors')
  names = {name.removeprefix(layout.root) for name in stored}
  assert {layout.embedding, 'action_in_proj.weight'} <= names
  norm = f'{layout.root}paligemma_with_expert.gemma_expert.model.norm.'
  if config.adaptive:
    assert stored[f'{norm}dense.weight'].shape == (72, 24)
    gate = stored[f'{norm}dense.bias'][48:]
    np.testing.assert_array_equal(gate, params['expert']['norm_gate_bias_D'])
  else:
    assert stored[f'{norm}weight'].shape == (24,)
  # Of tensors that nothing reads, neither presence nor shape counts.
  head = f'{layout.root}{pi0_files.EXPERT_HEAD}'
  assert not stored[head].any()
  del stored[head]
  st.save_file(stored, tmp_path / 'one' / 'model.safetensors')
  assert pi0_files.layout_of(tmp_path / 'one') == layout
  read = pi0_files.read(tmp_path / 'one', config)
  jax.tree.map(np.testing.assert_array_equal, read, params)
  pi0_files.write(tmp_path / 'two', read, config, layout=layout)
  again = st.load_file(tmp_path / 'two' / 'model.safetensors')
  assert stored.keys() == again.keys() - {head}
  for name, x in stored.items():
    assert x.tobytes() == again[name].tobytes(), name


@pytest.mark.parametrize(('held', 'wanted'), [('π0', 'π0.5'), ('π0.5', 'π0')])
@pytest.mark.parametrize('root', ['', 'model.'])
def test_a_checkpoint_of_the_other_family_is_refused_by_name(
  held, wanted, root, tmp_path
):
  configs = {'π0': CONFIGS['pi0'], 'π0.5': CONFIGS['pi05']}
  params = random_params(configs[held])
  layout = pi0_files.Layout(root)
  pi0_files.write(tmp_path, params, configs[held], layout=layout)
  with pytest.raises(weights.CheckpointError) as error:
    pi0_files.read(tmp_path, configs[wanted])
  adaptive = wanted != 'π0.5'
  assert str(error.value) == (
    f'{tmp_path} holds a {held}, expected a {wanted}: give the folder of a '
    f'{wanted}, or set `pi0.Config.adaptive` to {adaptive}, which makes the '
    f'model a {held}.'
  )


def test_a_layer_that_is_missing_is_named_where_no_family_is_found(tmp_path):
  pi0_files.write(tmp_path, random_params(CONFIG), CONFIG)
  stored = st.load_file(tmp_path / 'model.safetensors')
  del stored['model.action_time_mlp_in.weight']
  st.save_file(stored, tmp_path / 'model.safetensors')
  missing = 'missing model.action_time_mlp_in.weight.$'
  with pytest.raises(weights.CheckpointError, match=missing):
    pi0_files.read(tmp_path, CONFIG)


@both
def test_an_openvla_is_refused_by_name_where_pi0_is_expected(config, tmp_path):
  wanted = 'π0.5' if config.adaptive else 'π0'
  tensor = {'language_model.norm.weight': np.ones(2, np.float32)}
  st.save_file(tensor, tmp_path / 'model.safetensors')
  with pytest.raises(weights.CheckpointError, match='holds another model, exp'):
    pi0_files.read(tmp_path, config)
  (tmp_path / 'config.json').write_text('{"model_type": "openvla"}')
  with pytest.raises(weights.CheckpointError) as error:
    pi0_files.read(tmp_path, config)
  assert str(error.value) == (
    f"{tmp_path} holds a model of type 'openvla', expected {wanted}, whose "
    "tensors have names with 'paligemma_with_expert.': give the folder of a "
    f'{wanted} in safetensors, as LeRobot or openpi write it.'
  )
