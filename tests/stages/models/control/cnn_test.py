"""The encoder of pictures against torch.nn, and what of all that is scaled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages.envs import push
from stages.envs.rollouts import obs_stats
from stages.models.control import cnn, gaussian_policy

CONFIG = cnn.Config(
  channels=(4, 6), kernel_sizes=(5, 3), strides=(2, 2), features=7
)
LIKE = {
  'image': {
    'front': jax.ShapeDtypeStruct((18, 20, 3), jnp.uint8),
    'wrist': jax.ShapeDtypeStruct((15, 13, 3), jnp.uint8),
  },
  'state': jax.ShapeDtypeStruct((4,), jnp.float32),
}


pytestmark = pytest.mark.usefixtures('in_float64')


def observations(*ahead, like=LIKE, seed=0):
  """Observations of any colors and numbers."""
  rng = np.random.default_rng(seed)

  def leaf(x):
    shape = (*ahead, *x.shape)
    if x.dtype == jnp.uint8:
      return rng.integers(0, 256, shape, np.uint8)
    return rng.normal(size=shape)

  return jax.tree.map(leaf, like)


def network():
  """The encoder, and parameters none of which is zero."""
  encoder = cnn.encoder(LIKE, CONFIG)
  params = jax.jit(encoder.init)(jax.random.key(0), observations(1))['params']
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(1)
  leaves = [x + 0.1 * rng.normal(size=x.shape) for x in leaves]
  return encoder, jax.tree.unflatten(tree, leaves)


def in_torch(weights, picture_BHWC):
  """The network of a camera, of torch's own layers."""
  torch = pytest.importorskip('torch', reason='The reference needs torch.')
  nn = torch.nn
  tensor = lambda x: torch.tensor(np.array(x))
  channels = 3, *CONFIG.channels
  layers = []
  for i, (window, stride) in enumerate(
    zip(CONFIG.kernel_sizes, CONFIG.strides, strict=True)
  ):
    layer = nn.Conv2d(channels[i], channels[i + 1], window, stride)
    with torch.no_grad():
      # torch has outputs first, and pixels last.
      kernel = np.transpose(weights[f'layer{i}_UUOF'], (3, 2, 0, 1))
      layer.weight = nn.Parameter(tensor(kernel))
      layer.bias = nn.Parameter(tensor(weights[f'layer{i}_bias_F']))
    layers += [layer, nn.ReLU()]
  x = tensor(picture_BHWC).permute(0, 3, 1, 2).double() / 255
  x = nn.Sequential(*layers)(x).permute(0, 2, 3, 1).flatten(1)
  last = nn.Linear(x.shape[1], CONFIG.features).double()
  with torch.no_grad():
    last.weight = nn.Parameter(tensor(weights['out_OD']).T)
    last.bias = nn.Parameter(tensor(weights['out_bias_D']))
  return nn.functional.relu(last(x)).detach().numpy()


def test_the_encoder_is_that_of_torch():
  encoder, params = network()
  obs = observations(5)
  got = jax.jit(encoder.apply)({'params': params}, obs)
  want = [
    in_torch(params[f'image_{camera}'], obs['image'][camera])
    for camera in ('front', 'wrist')
  ]
  want = np.concatenate([*want, obs['state']], 1)
  assert (want[:, : 2 * CONFIG.features] > 0).any(0).sum() > CONFIG.features
  np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


def test_a_spatial_softmax_says_where_a_channel_sees_something():
  config = cnn.Config((2,), (1,), (1,), None)
  like = jax.ShapeDtypeStruct((5, 9, 2), jnp.uint8)
  encoder = cnn.encoder(like, config)
  picture = np.zeros((2, 5, 9, 2), np.uint8)
  # Of two rows: where the first and the second color are.
  at = [((0, 8), (4, 0)), ((2, 4), (1, 6))]
  for b, places in enumerate(at):
    for color, (row, column) in enumerate(places):
      picture[b, row, column, color] = 255
  eye = {
    'layer0_UUOF': 99.0 * np.eye(2)[None, None],
    'layer0_bias_F': np.array([3.0, -4.0]),  # Softmax is blind to it.
    'sharpness': np.array(1.0),
  }
  got = jax.jit(encoder.apply)({'params': {'': eye}}, picture)
  want = [[-1, 1, 1, -1], [0, -0.5, 0, 0.5]]
  np.testing.assert_allclose(got, want, atol=1e-12)
  even = jax.jit(encoder.apply)({'params': {'': eye}}, 0 * picture)
  np.testing.assert_allclose(even, np.zeros((2, 4)), atol=1e-12)


def test_rows_and_steps_may_lie_ahead():
  encoder, params = network()
  encode = jax.jit(encoder.apply)
  obs = observations(2, 3)
  rows = jax.tree.map(lambda x: x.reshape(6, *x.shape[2:]), obs)
  got, want = (encode({'params': params}, x) for x in (obs, rows))
  np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-12)
  one = encode({'params': params}, jax.tree.map(lambda x: x[0, 0], obs))
  np.testing.assert_allclose(one, want[0], rtol=1e-12)


def test_actor_and_critic_both_teach_every_weight_of_the_encoder():
  env = push.push(image_size=12)
  policy = gaussian_policy.policy(env, width=8, camera_encoder=CONFIG)
  params = jax.jit(policy.init)(jax.random.key(0))
  obs = observations(16, like=env.obs_spec)
  action = np.random.default_rng(2).normal(size=(16, 2))

  def loss(params, field):
    return getattr(policy.evaluate(params, obs, action), field).sum()

  gradient = jax.jit(jax.grad(loss), static_argnums=1)
  for field in ('logp', 'value'):
    (eye,) = gradient(params, field)['encoder'].values()
    for name, x in eye.items():
      x = np.asarray(x)
      # All of an output that is dead for all of the rows has no gradient.
      assert (np.abs(x).reshape(-1, x.shape[-1]).max(0) > 0).any(), name


def test_a_value_is_the_same_alone_and_beside_the_action():
  env = push.push(image_size=12)
  policy = gaussian_policy.policy(env, width=8, camera_encoder=CONFIG)
  params = jax.jit(policy.init)(jax.random.key(0))
  obs, evaluate = observations(4, like=env.obs_spec), jax.jit(policy.evaluate)
  both = evaluate(params, obs, np.zeros((4, 2)))
  alone = jax.jit(policy.value)(params, obs)
  np.testing.assert_allclose(alone, both.value, rtol=1e-12)


def test_a_moment_of_what_is_seen_is_kept_of_numbers_alone():
  obs = observations(9)
  scale = obs_stats.from_batch(obs, LIKE)
  assert scale.count == 9 and scale.mean['image'] == {
    'front': None,
    'wrist': None,
  }
  np.testing.assert_allclose(scale.mean['state'], obs['state'].mean(0))
  twice = obs_stats.init(LIKE).merge(scale).merge(scale)
  got = obs_stats.normalize(twice, obs)
  for camera, picture in obs['image'].items():
    assert got['image'][camera] is picture  # Bytes, and not one changed.
  np.testing.assert_allclose(got['state'].mean(0), 0, atol=1e-12)
  np.testing.assert_allclose(got['state'].std(0), 1, rtol=1e-6)


def test_pictures_alone_are_read_too():
  picture = LIKE['image']['front']
  encoder = cnn.encoder(picture, CONFIG)
  encode = lambda key, obs: encoder.init_with_output(key, obs)[0]
  got = jax.eval_shape(encode, jax.random.key(0), observations(2, like=picture))
  assert got.shape == (2, CONFIG.features)
  scale = obs_stats.from_batch(observations(5, like=picture), picture)
  assert scale.count == 5 and scale.mean is None


def test_what_cannot_be_read_is_refused():
  text = {**LIKE, 'instruction': jax.ShapeDtypeStruct((128,), jnp.uint8)}
  with pytest.raises(ValueError, match=r"returns 'instruction', uint8 \[128\]"):
    cnn.encoder(text, CONFIG)
  assert cnn.encoder(text, CONFIG, ('instruction',)) == cnn.encoder(
    LIKE, CONFIG
  )
  with pytest.raises(ValueError, match="'image/front' is 18 pixels by 20, too"):
    cnn.encoder(LIKE, cnn.Config())
