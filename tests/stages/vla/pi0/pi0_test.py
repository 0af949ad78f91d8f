"""π0 and π0.5 against LeRobot's, and what their masks and caches promise."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lerobot_models
from stages import base
from stages.models.control import flow_matching
from stages.models.files import weights
from stages.models.layers import attention
from stages.models.vision import vit
from stages.vla import instructions
from stages.vla.pi0 import pi0, pi0_files, pi0_policy

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


# Against LeRobot.


def lerobot_config(adaptive):
  """The sizes of `lerobot_models`."""
  m = lerobot_models
  sizes = {'L': m.DEPTH, 'H': 8, 'K': 1, 'W': m.HEAD, 'F': m.MLP}
  return pi0.Config(
    vit.Config(image_size=m.IMAGE, patch_size=14, F=m.MLP, **m.TOWER),
    pi0.GEMMA(V=257_152, D=m.WIDTH, **sizes),
    pi0.GEMMA(V=1, D=m.EXPERT_WIDTH, **sizes),
    Z=m.CHUNK,
    A=m.ACTION,
    O=m.STATE,
    adaptive=adaptive,
  )


@pytest.mark.skipif(
  not lerobot_models.HAS_LEROBOT, reason=lerobot_models.REASON
)
@pytest.mark.parametrize('adaptive', [False, True], ids=['pi0', 'pi05'])
def test_velocities_and_actions_are_lerobots(adaptive, tmp_path):
  from safetensors.torch import save_model
  import torch

  m, config = lerobot_models, lerobot_config(adaptive)
  model = m.model(adaptive)
  save_model(model, str(tmp_path / 'model.safetensors'))
  params = pi0_files.read(tmp_path, config)
  rng = np.random.default_rng(0)
  real = lambda *shape: rng.normal(size=shape).astype(np.float32)
  images = [real(B, 3, m.IMAGE, m.IMAGE) for _ in range(2)]
  has_image = [np.array([True, True]), np.array([True, False])]
  token = rng.integers(0, 257_000, (B, 6))
  is_token = np.arange(6)[None] < np.array([[6], [4]])
  state, action, noise = real(B, m.STATE), *real(2, B, m.CHUNK, m.ACTION)
  time = np.array([0.2, 0.8], np.float32)
  t = lambda x: jax.tree.map(lambda y: torch.tensor(np.array(y)), x)
  prefix = t(images), t(has_image), t(token), t(is_token)
  states = () if adaptive else (t(state),)
  with torch.no_grad():
    loss = model(*prefix, *states, t(action), t(noise), t(time)).numpy()
    actions = model.sample_actions(*prefix, *states, noise=t(noise)).numpy()
    embedded, mask, _ = model.embed_prefix(*prefix)
  x_BPD = jnp.concatenate(
    [
      *(
        pi0.embed_images(config, params, jnp.moveaxis(jnp.array(x), 1, -1))
        for x in images
      ),
      pi0.embed_tokens(config, params, jnp.asarray(token)),
    ],
    axis=1,
  )
  np.testing.assert_allclose(x_BPD, np.asarray(embedded), atol=1e-4)
  cache = pi0.encode(config, params, x_BPD, jnp.array(mask.numpy()))
  velocity = jax.jit(
    lambda x, t_B: pi0.velocity(config, params, cache, state, x, t_B)
  )
  noisy = time[:, None, None] * noise + (1 - time[:, None, None]) * action
  got = (
    velocity(jnp.asarray(noisy), jnp.asarray(time)) - (noise - action)
  ) ** 2
  np.testing.assert_allclose(got, loss, atol=1e-4)
  x = jnp.asarray(noise)
  for k in range(4):
    v = velocity(x, jnp.full(B, flow_matching.step_time(k, 4), jnp.float32))
    x = flow_matching.euler_step(x, v, 4)
  np.testing.assert_allclose(x, actions, atol=1e-4)
  print('largest differences', np.abs(got - loss).max(), abs(x - actions).max())


@pytest.mark.skipif(
  not lerobot_models.HAS_LEROBOT, reason=lerobot_models.REASON
)
@pytest.mark.parametrize('adaptive', [False, True], ids=['pi0', 'pi05'])
def test_the_loss_of_cloning_is_lerobots(adaptive, tmp_path):
  """From pictures and a robot's units, at the times and noise of our keys."""
  from safetensors.torch import save_model
  import torch

  m, config = lerobot_models, lerobot_config(adaptive)
  model = m.model(adaptive)
  save_model(model, str(tmp_path / 'model.safetensors'))
  stats = {
    part: {
      'mean': [0.5] * n,
      'std': [2.0] * n,
      'q01': [-1.5] * n,
      'q99': [2.5] * n,
    }
    for part, n in (('state', m.STATE), ('actions', m.ACTION))
  }
  table = instructions.StateTokens(
    7 + np.arange(257)[:, None], np.ones((257, 1), np.int32), np.array([3, 5])
  )
  policy = pi0_policy.policy(
    None,
    config,
    state_tokens=table if adaptive else None,
    checkpoint=str(tmp_path),
    norm_stats=stats,
    cameras=('image/a', 'image/b'),
    vectors=('state',),
    critic=False,
  )
  rng = np.random.default_rng(0)
  pictures = rng.integers(0, 256, (2, B, m.IMAGE, m.IMAGE, 3), np.uint8)
  token = rng.integers(0, 257_000, (B, 6)).astype(np.int32)
  is_token = np.arange(6)[None] < np.array([[6], [4]])
  state = rng.uniform(-2, 3, (B, m.STATE)).astype(np.float32)
  action = rng.normal(size=(B, m.CHUNK, m.ACTION)).astype(np.float32)
  obs = {
    'image': dict(zip('ab', jnp.asarray(pictures), strict=True)),
    'state': jnp.asarray(state),
    base.PROMPT: {
      'token': jnp.asarray(token),
      'mask': jnp.asarray(is_token.astype(np.int32)),
    },
  }
  keys = jax.random.split(jax.random.key(3), B)
  params = policy.init(jax.random.key(0))
  got = policy.imitation_loss(params, obs, jnp.asarray(action), keys)
  noise_key, time_key = jax.vmap(jax.random.split, out_axes=1)(keys)
  draw = lambda key: jax.random.normal(key, (m.CHUNK * m.ACTION,))
  noise = jax.vmap(draw)(noise_key).reshape(action.shape)
  time = jax.vmap(flow_matching.draw_time)(time_key)
  low, high = -1.5, 2.5
  if adaptive:  # As its text would have it: task, numbers, end.
    normal = (state - low) / (high - low + 1e-6) * 2 - 1
    number = np.digitize(normal, np.linspace(-1, 1, 257)[:-1])
    end = np.tile([3, 5], (B, 1))
    token = np.concatenate([token, 7 + number, end], axis=1)
    rest = np.ones((B, number.shape[1] + 2), bool)
    is_token, states = np.concatenate([is_token, rest], axis=1), ()
  else:
    states = ((state - 0.5) / (2.0 + 1e-6),)
  t = lambda x: torch.tensor(np.array(x))
  f = lambda x: t(np.asarray(x, np.float32))
  images = [f(np.moveaxis(x, -1, 1) / 127.5 - 1.0) for x in pictures]
  with torch.no_grad():
    loss = model(
      images,
      [t(np.ones(B, bool))] * 2,
      t(token),
      t(is_token),
      *map(f, states),
      f(action),
      f(noise),
      f(time),
    )
  np.testing.assert_allclose(got, loss.numpy().mean((1, 2)), atol=1e-4)


# Files.


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
  from safetensors import numpy as st

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
  # Tensors that nothing reads may be there.
  stored[f'{layout.root}{pi0_files.EXPERT_HEAD}'] = np.zeros((3, 24), 'float32')
  st.save_file(stored, tmp_path / 'one' / 'model.safetensors')
  assert pi0_files.layout_of(tmp_path / 'one') == layout
  read = pi0_files.read(tmp_path / 'one', config)
  jax.tree.map(np.testing.assert_array_equal, read, params)
  pi0_files.write(tmp_path / 'two', read, config, layout=layout)
  again = st.load_file(tmp_path / 'two' / 'model.safetensors')
  del stored[f'{layout.root}{pi0_files.EXPERT_HEAD}']
  assert stored.keys() == again.keys()
  for name, x in stored.items():
    assert x.tobytes() == again[name].tobytes(), name


def test_a_checkpoint_of_the_other_model_is_refused(tmp_path):
  params = random_params(CONFIGS['pi0'])
  pi0_files.write(tmp_path, params, CONFIGS['pi0'])
  with pytest.raises(weights.CheckpointError, match='missing .*dense.*extra'):
    pi0_files.read(tmp_path, CONFIGS['pi05'])
