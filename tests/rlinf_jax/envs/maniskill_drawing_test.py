"""Pictures that ManiSkill draws of a chunk of actions, and looks of its arm."""

from concurrent import futures
import gc
import importlib.util
import multiprocessing

import numpy as np
import pytest

from rlinf_jax.envs import maniskill, maniskill_drawing, simulator
from rlinf_jax.envs.put_on_plate import kinds

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    importlib.util.find_spec('mani_skill') is None,
    reason='ManiSkill is not installed: pip install "rlinf-jax[maniskill]"',
  ),
]
DOWN = np.array([0.0, 0.0, -0.5, 0.0, 0.0, 0.0, 1.0], np.float32)


@pytest.fixture(scope='module')
def elsewhere():
  """Calls a function in another process: simulators are not in this one."""
  spawn = multiprocessing.get_context('spawn')
  with futures.ProcessPoolExecutor(1, spawn) as process:
    yield lambda function: process.submit(function).result()


@pytest.fixture(scope='module')
def pictured(elsewhere):
  """Likewise; skips the test where nothing can draw."""

  def call(function):
    try:
      return elsewhere(function)
    except simulator.UnavailableError as error:
      assert 'need a Vulkan device' in str(error)
      pytest.skip(str(error))

  return call


def made(task=kinds.TASK, **settings):
  """An environment that ends after three steps."""
  return maniskill.make(
    0, task, control_mode='pd_ee_delta_pose', horizon=3, **settings
  )


def advanced():
  """Steps of which all are read, of which none is, and pictures of each."""
  steps, drawn = [], []
  for name in ('step', 'advance'):
    env = made(images=True, image_size=16, reward_mode='staged')
    draw = env._env._sensors['base_camera'].capture
    pictures = []
    env._env._sensors['base_camera'].capture = lambda: pictures.append(draw())
    env.reset(1)
    # A reset makes the scene anew, and its cameras.
    draw = env._env._sensors['base_camera'].capture
    env._env._sensors['base_camera'].capture = lambda: pictures.append(draw())
    pictures.clear()
    steps.append([getattr(env, name)(DOWN) for _ in range(3)])
    drawn.append(len(pictures))
  return steps, drawn


def test_pictures_that_no_policy_reads_are_not_drawn(pictured):
  (each, last), drawn = pictured(advanced)
  assert drawn == [3, 1]
  assert [x.obs is None for x in last] == [True, True, False]
  for x, y in zip(each, last, strict=True):
    assert x._replace(obs=None) == y._replace(obs=None)
  want, got = (simulator.leaves(x[-1].obs) for x in (each, last))
  assert [*got] == [*want]
  for path, x in want.items():
    np.testing.assert_array_equal(got[path], x)


def advanced_in_states():
  env = made('PickCube-v1')
  env.reset(1)
  return [env.advance(DOWN) for _ in range(3)]


def test_states_are_returned_at_the_end_of_an_episode(elsewhere):
  steps = elsewhere(advanced_in_states)
  assert [x.obs is None for x in steps] == [True, True, False]
  assert steps[-1].truncated and np.isfinite(steps[-1].obs).all()
  assert all(0 < x.reward < 1 for x in steps)


def frozen_by_two():
  made('PickCube-v1')
  before = gc.get_freeze_count()
  made('PickCube-v1')
  return before, gc.get_freeze_count()


def test_collections_of_a_reset_do_not_visit_modules_nor_miss_scenes(elsewhere):
  before, after = elsewhere(frozen_by_two)
  assert before > 100_000
  assert after == before  # The first environment's scene is not frozen.


def corners(env) -> int:
  """Corners of all triangles of the robot that are drawn."""
  import sapien

  bodies = [
    body
    for link in env._env.agent.robot.links
    for body in link._objs[0].entity.components
    if isinstance(body, sapien.render.RenderBodyComponent) and body.visibility
  ]
  shapes = [shape for body in bodies for shape in body.render_shapes]
  return sum(len(p.vertices) for shape in shapes for p in shape.parts)


def looks():
  """Pictures and numbers of corners, after a first and a second reset."""
  rows = []
  for fast in (False, True):
    env = made(images=True, image_size=64, fast_rendering=fast)
    for seed in (1, 2):
      obs = env.reset(seed)
      for _ in range(2):
        obs = env.step(DOWN).obs
      rows.append((obs['image']['base_camera'].astype(int), corners(env)))
  return rows


def test_an_arm_drawn_by_its_collision_shapes_is_cheap_and_looks_alike(
  pictured,
):
  *full, first, second = pictured(looks)
  for (want, most), (got, few) in zip(full, (first, second), strict=True):
    assert few < most / 20
    changed = (np.abs(want - got) > 40).any(-1)
    assert 0 < changed.mean() < 0.1
    # The lower half shows things, which look as before.
    assert changed[32:].mean() < 0.02


def test_a_step_without_pictures_leaves_the_environment_as_it_was():
  class Drawing:
    def _get_obs_sensor_data(self):
      return {'camera': 1}

  env = Drawing()
  with pytest.raises(ZeroDivisionError):
    with maniskill_drawing.no_pictures(env):
      assert env._get_obs_sensor_data() == {}
      raise ZeroDivisionError
  assert env._get_obs_sensor_data() == {'camera': 1}
