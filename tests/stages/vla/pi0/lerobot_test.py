"""Layers, velocities, actions and losses of π0 and π0.5 against LeRobot's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lerobot_models
from stages import base
from stages.models.control import flow_matching
from stages.models.vision import vit
from stages.vla import instructions
from stages.vla.pi0 import pi0, pi0_files, pi0_policy

B = 2

pytestmark = [
  pytest.mark.usefixtures('in_float64'),
  pytest.mark.skipif(
    not lerobot_models.HAS_LEROBOT, reason=lerobot_models.REASON
  ),
]


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


def layer_outputs(model, run):
  """Outputs of each layer of LeRobot's trunk and expert, as `run` calls them.

  Returns:
    the outputs of the trunk's layers and of the expert's, the latter after
    LeRobot's last norm, of the first call of each.
  """
  from lerobot.policies import pi_gemma

  both = model.paligemma_with_expert
  expert = both.gemma_expert.model
  of_trunk, of_expert = {}, {}

  def keep(found, name, finish):
    def hook(module, args, kwargs, output):
      del module, args
      x = output[0] if isinstance(output, tuple) else output
      found.setdefault(name, finish(x, kwargs.get('adarms_cond')).numpy())

    return hook

  def normed(x, condition):
    return pi_gemma.layernorm_forward(expert.norm, x, condition)[0]

  pairs = [
    (both.paligemma.model.language_model.layers, of_trunk, lambda x, _: x),
    (expert.layers, of_expert, normed),
  ]
  handles = [
    layer.register_forward_hook(keep(found, i, finish), with_kwargs=True)
    for layers, found, finish in pairs
    for i, layer in enumerate(layers)
  ]
  run()
  for handle in handles:
    handle.remove()
  return of_trunk, of_expert


def first_layers(config, params, n):
  """A model of the first n layers of both networks."""
  first = lambda part: dataclasses.replace(getattr(config, part), L=n)
  cut = {
    part: params[part]
    | {'layers': jax.tree.map(lambda x: x[:n], params[part]['layers'])}
    for part in ('trunk', 'expert')
  }
  config = dataclasses.replace(
    config, trunk=first('trunk'), expert=first('expert')
  )
  return config, params | cut


def compare_layers(config, params, outputs, x_BPD, mask_BP, state, noise):
  """Holds each layer against LeRobot's, at the first step from noise."""
  of_trunk, of_expert = outputs
  assert [*of_trunk] == [*of_expert] == [*range(config.trunk.L)]
  for n, want in of_trunk.items():
    few, own = first_layers(config, params, n + 1)
    prefix = pi0.encode(few, own, x_BPD, mask_BP)
    np.testing.assert_allclose(
      prefix.output[mask_BP], want[mask_BP], rtol=0, atol=1e-4
    )
    got = pi0.expert_states(few, own, prefix, state, noise, jnp.ones(B))
    want = of_expert[n][:, -config.Z :]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


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
    actions = []
    sample = functools.partial(model.sample_actions, *prefix, *states)
    outputs = layer_outputs(
      model, lambda: actions.append(sample(noise=t(noise)).numpy())
    )
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
  mask = jnp.array(mask.numpy())
  compare_layers(config, params, outputs, x_BPD, mask, state, noise)
  cache = pi0.encode(config, params, x_BPD, mask)
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
  np.testing.assert_allclose(x, actions[0], atol=1e-4)
  largest = np.abs(got - loss).max(), abs(x - actions[0]).max()
  print('largest differences', *largest)


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
