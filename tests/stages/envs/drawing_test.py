"""Images of environments against pixels that are sampled point by point."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages.envs import drawing, push, reach, vectorize

ENVS = {'push': push.push, 'reach': reach.reach}
WHITE, RED = (1.0, 1.0, 1.0), (1.0, 0.0, 0.0)
POINTS = 16  # Along each edge of a pixel.
image = jax.jit(drawing.image, static_argnums=1)


def stroke(start, end, radius, color=WHITE):
  return drawing.Stroke(jnp.array(start), jnp.array(end), radius, color)


def coverage(size, start, end, radius):
  """The share of each pixel's points within `radius` of the segment."""
  start, end = np.array(start), np.array(end)
  share = np.zeros((size, size))
  for row in range(size):
    for column in range(size):
      at = (np.arange(POINTS) + 0.5) / POINTS
      x = (column + at) / size * 2 - 1
      y = 1 - (row + at) / size * 2
      for point in np.stack(np.meshgrid(x, y), -1).reshape(-1, 2):
        # Distance to the nearest of many points of the segment.
        line = start + np.linspace(0, 1, 21)[:, None] * (end - start)
        near = np.linalg.norm(line - point, axis=1).min() < radius
        share[row, column] += near
  return share / POINTS**2


@pytest.mark.parametrize(
  'line', [((0.3, -0.2),) * 2, ((-0.5, -0.4), (0.4, 0.5))]
)
def test_coverage_of_a_stroke_is_its_share_of_points(line):
  size, radius = 8, 0.35
  got = np.asarray(image([stroke(*line, radius)], size))
  share = coverage(size, *line, radius)[..., None]
  want = share + np.array(drawing.BACKGROUND) * (1 - share)
  # `image` takes edges to be straight and parallel to the pixel: off by 0.1
  # of a pixel where they are neither.
  np.testing.assert_allclose(got / 255, want, atol=0.12)
  np.testing.assert_allclose((got / 255).mean(), want.mean(), atol=0.01)


def test_later_strokes_lie_above():
  both = [stroke((0.0,) * 2, (0.0,) * 2, 9.0, c) for c in (RED, WHITE)]
  assert (np.asarray(image(both, 4)) == 255).all()
  above = np.asarray(image(both[::-1], 4))
  np.testing.assert_array_equal(above, np.broadcast_to([255, 0, 0], (4, 4, 3)))


def test_a_motion_of_a_tenth_of_a_pixel_changes_the_image():
  size = 16
  got = [
    image([drawing.disc(jnp.array([x, 0.0]), 0.2, WHITE)], size)
    for x in (0.0, 0.1 * 2 / size)
  ]
  assert np.abs(np.subtract(*map(np.float32, got))).max() > 10


def test_right_is_the_first_axis_and_up_the_second():
  disc = drawing.disc(jnp.array([0.5, 0.5]), 0.4, WHITE)
  got = np.asarray(image([disc], 2))
  assert got[0, 1].min() > 150
  assert got[[0, 1, 1], [0, 0, 1]].max() < 50


@pytest.mark.parametrize('name', ENVS)
def test_images_show_the_goal_that_the_state_hides(name):
  env = ENVS[name](image_size=16)
  assert env.obs_spec['image']['table'] == jax.ShapeDtypeStruct(
    (16, 16, 3), jnp.uint8
  )
  state, _ = jax.jit(env.init)(jnp.arange(2, dtype=jnp.int32))
  table = state.task_state
  others = state._replace(task_state=table._replace(goal=table.goal[::-1]))
  still, step = jnp.zeros((2, 2)), jax.jit(env.step)
  (_, here), (_, there) = step(state, still), step(others, still)
  np.testing.assert_array_equal(here.obs['state'], there.obs['state'])
  assert (here.reward != there.reward).all()
  images = [np.asarray(x.obs['image']['table']) for x in (here, there)]
  assert (images[0] != images[1]).any((1, 2, 3)).all()


@pytest.mark.parametrize('name', ENVS)
def test_rendering_equals_the_image_observation(name):
  env = ENVS[name](image_size=16)
  seed = jnp.arange(3, dtype=jnp.int32)
  state, obs = jax.jit(env.init)(seed)
  rendered = jax.jit(env.render, static_argnums=1)(state, 16)
  np.testing.assert_array_equal(rendered, obs['image']['table'])
  like = jax.eval_shape(env.render, state)
  assert like.shape == (3, drawing.SIZE, drawing.SIZE, 3)


def test_a_task_without_render_has_no_images():
  task = vectorize.Task(
    push.reset, push.step, push.observe, lambda at: (0.0, 0.0)
  )
  setting = {'action_low': (-1.0,) * 2, 'action_high': (1.0,) * 2, 'horizon': 5}
  env = vectorize.env(task, **setting, terminate=False)
  assert env.render is None
  with pytest.raises(ValueError, match='has no `render`'):
    vectorize.env(task, **setting, terminate=False, image_size=8)
