"""Pictures of worlds, against pixels that are filled point by point."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages.envs import drawing, push, reach, vectorize

WORLDS = {'push': push.push, 'reach': reach.reach}
WHITE, RED = (1.0, 1.0, 1.0), (1.0, 0.0, 0.0)
POINTS = 16  # Along each edge of a pixel.
picture = jax.jit(drawing.picture, static_argnums=1)


def stroke(start, end, radius, color=WHITE):
  return drawing.Stroke(jnp.array(start), jnp.array(end), radius, color)


def filled(size, start, end, radius):
  """The share of each pixel's points that are nearer than `radius`."""
  start, end = np.array(start), np.array(end)
  share = np.zeros((size, size))
  for row in range(size):
    for column in range(size):
      at = (np.arange(POINTS) + 0.5) / POINTS
      x = (column + at) / size * 2 - 1
      y = 1 - (row + at) / size * 2
      for point in np.stack(np.meshgrid(x, y), -1).reshape(-1, 2):
        # The nearest of many points of the line.
        line = start + np.linspace(0, 1, 21)[:, None] * (end - start)
        near = np.linalg.norm(line - point, axis=1).min() < radius
        share[row, column] += near
  return share / POINTS**2


@pytest.mark.parametrize(
  'line', [((0.3, -0.2),) * 2, ((-0.5, -0.4), (0.4, 0.5))]
)
def test_a_stroke_covers_what_a_brush_would(line):
  size, radius = 8, 0.35
  made = np.asarray(picture([stroke(*line, radius)], size))
  share = filled(size, *line, radius)[..., None]
  want = share + np.array(drawing.PAPER) * (1 - share)
  # An edge is taken to be straight and along the pixel: off by 0.1 of a pixel
  # where it is neither.
  np.testing.assert_allclose(made / 255, want, atol=0.12)
  np.testing.assert_allclose((made / 255).mean(), want.mean(), atol=0.01)


def test_what_comes_later_lies_above():
  both = [stroke((0.0,) * 2, (0.0,) * 2, 9.0, c) for c in (RED, WHITE)]
  assert (np.asarray(picture(both, 4)) == 255).all()
  above = np.asarray(picture(both[::-1], 4))
  np.testing.assert_array_equal(above, np.broadcast_to([255, 0, 0], (4, 4, 3)))


def test_a_motion_of_a_tenth_of_a_pixel_is_seen():
  size = 16
  made = [
    picture([drawing.disc(jnp.array([x, 0.0]), 0.2, WHITE)], size)
    for x in (0.0, 0.1 * 2 / size)
  ]
  assert np.abs(np.subtract(*map(np.float32, made))).max() > 10


def test_right_is_the_first_axis_and_up_the_second():
  disc = drawing.disc(jnp.array([0.5, 0.5]), 0.4, WHITE)
  made = np.asarray(picture([disc], 2))
  assert made[0, 1].min() > 150
  assert made[[0, 1, 1], [0, 0, 1]].max() < 50


@pytest.mark.parametrize('name', WORLDS)
def test_pictures_show_what_is_hidden_from_the_state(name):
  world = WORLDS[name](image_size=16)
  assert world.obs_spec['image']['table'] == jax.ShapeDtypeStruct(
    (16, 16, 3), jnp.uint8
  )
  state, _ = jax.jit(world.init)(jnp.arange(2, dtype=jnp.int32))
  place = state.place
  others = state._replace(place=place._replace(goal=place.goal[::-1]))
  still, step = jnp.zeros((2, 2)), jax.jit(world.step)
  (_, here), (_, there) = step(state, still), step(others, still)
  np.testing.assert_array_equal(here.obs['state'], there.obs['state'])
  assert (here.reward != there.reward).all()
  seen = [np.asarray(x.obs['image']['table']) for x in (here, there)]
  assert (seen[0] != seen[1]).any((1, 2, 3)).all()


@pytest.mark.parametrize('name', WORLDS)
def test_what_is_drawn_for_people_is_what_is_seen(name):
  world = WORLDS[name](image_size=16)
  seed = jnp.arange(3, dtype=jnp.int32)
  state, obs = jax.jit(world.init)(seed)
  drawn = jax.jit(world.render, static_argnums=1)(state, 16)
  np.testing.assert_array_equal(drawn, obs['image']['table'])
  like = jax.eval_shape(world.render, state)
  assert like.shape == (3, drawing.SIZE, drawing.SIZE, 3)


def test_a_task_without_a_scene_is_not_drawn():
  task = vectorize.Task(push.begin, push.move, push.look, lambda at: (0.0, 0.0))
  setting = {'action_low': (-1.0,) * 2, 'action_high': (1.0,) * 2, 'horizon': 5}
  world = vectorize.env(task, **setting, terminate=False)
  assert world.render is None
  with pytest.raises(ValueError, match='no scene'):
    vectorize.env(task, **setting, terminate=False, image_size=8)
