"""The task with a plate: its kinds, its expert, and what policies are told."""

import functools
import importlib.util

import jax
import numpy as np
import pytest

from rlinf_jax.envs import env_pool, maniskill, simulator
from rlinf_jax.envs.put_on_plate import kinds, placement
from rlinf_jax.prepare import plate_script
from stages import base
from stages.envs import seed_source

HORIZON = 40
simulated = pytest.mark.skipif(
  importlib.util.find_spec('mani_skill') is None,
  reason='ManiSkill is not installed: pip install "rlinf-jax[maniskill]"',
)


def codes(texts):
  """The bytes of texts, in place of a tokenizer's."""
  rows = [np.frombuffer(x.encode().ljust(64, b'\0'), np.uint8) for x in texts]
  return base.Prompt(np.stack(rows), np.stack(rows) > 0)


def test_held_out_kinds_have_shapes_and_colors_that_are_trained_on():
  assert (len(kinds.TRAIN), len(kinds.HELD_OUT)) == (16, 9)
  assert not {*kinds.TRAIN} & {*kinds.HELD_OUT}
  for i in range(2):
    words = lambda names, i=i: {name.split()[i] for name in names}
    assert words(kinds.TRAIN) == words(kinds.HELD_OUT) == words(kinds.ALL)


def test_an_evaluation_has_every_kind_equally_often():
  seed = seed_source.FIRST_HELD_OUT + np.arange(48)
  number = kinds.number_of_episode(seed, 16)
  assert np.bincount(number).tolist() == [3] * 16


@pytest.mark.parametrize(
  'given, message',
  [
    ('test', "set of kinds 'test'"),
    (['red cup'], "'red cup'"),
    (['red cube', 'red ball', 'red cube'], "'red cube' is given more than"),
    ((), 'No kind'),
  ],
)
def test_unknown_kinds_are_refused(given, message):
  with pytest.raises(ValueError, match=message):
    kinds.named(given)


@pytest.mark.parametrize(
  'number, num_kinds, message',
  [(2, 2, 'need as many further kinds'), (5, 25, 'give at most 4')],
)
def test_distractors_without_a_kind_or_a_position_are_refused(
  number, num_kinds, message
):
  with pytest.raises(ValueError, match=message):
    placement.check_distractors(number, num_kinds)


def test_the_most_objects_have_their_distances():
  at = placement.draw(3, placement.MOST_OBJECTS)[:, :2]
  far = np.linalg.norm(at[:, None] - at[None], axis=-1)
  assert (far[0, 1:] >= placement.FROM_PLATE).all()
  pairs = np.triu_indices(placement.MOST_OBJECTS, 1)
  assert (far[1:, 1:][pairs] >= placement.FROM_OBJECT).all()
  assert (abs(at - placement.CENTER) <= placement.HALF_AREA).all()


def fake_pool(make, num_envs, num_processes, **settings):
  """The settings of a pool, in place of one."""
  del make, num_envs, num_processes
  Made = functools.partial(dict, settings=settings)
  return type('Made', (), {'_replace': lambda self, **x: Made(**x)})()


def test_an_encoder_is_given_each_instruction_of_the_kinds(monkeypatch):
  monkeypatch.setattr(env_pool, 'env', fake_pool)
  task = functools.partial(maniskill.env, kinds.TASK, 1, instructions=codes)
  made = task(kinds='held_out')
  assert made['tasks'] == kinds.HELD_OUT
  texts = [kinds.instruction(kind) for kind in kinds.HELD_OUT]
  assert [*made['settings']['prompts']] == texts
  token_B3 = np.array([[0, 0, 9], [1, 0, 2**30 + 1]])
  assert made['task'](token_B3).tolist() == [0, (2**30 + 1) % 9]
  told = task(instruction='put it there')['settings']
  assert [*told['prompts']] == ['put it there']


def test_an_encoder_without_an_instruction_is_refused():
  with pytest.raises(ValueError, match='does not say what is to be done'):
    maniskill.env('PickCube-v1', 1, instructions=codes)
  with pytest.raises(ValueError, match='no encoder'):
    maniskill.env(kinds.TASK, 1, instruction='put it there')


class Speaking:
  """An environment that says something else in each episode."""

  def __init__(self):
    self.text = 'put carrot on plate'

  def get_language_instruction(self):
    return [self.text]


def test_observations_have_what_the_task_says_of_the_episode():
  env, told = Speaking(), {'put carrot on plate': {'token': 1, 'mask': 2}}
  instruction = maniskill.Instruction(env, None, told)
  assert instruction.obs() == {'prompt': {'token': 1, 'mask': 2}}
  env.text = 'put the red cube on the plate'
  with pytest.raises(simulator.UnavailableError, match='put the red cube'):
    instruction.obs()
  text = instruction._replace(prompts=None).obs()['instruction'].tobytes()
  assert text.rstrip(b'\0').decode() == env.text
  assert maniskill.Instruction(object(), None, None).obs() == {}


@pytest.fixture(scope='module')
def pool():
  """Two environments in one process."""
  made = env_pool.make_pool(
    maniskill.make,
    2,
    task=kinds.TASK,
    kinds='all',
    num_distractors=1,
    control_mode='pd_ee_delta_pose',
    reward_mode='staged',
    horizon=HORIZON,
  )
  yield made
  made.close()


def play(pool, token, obs, steps):
  """The scripted controller's time steps, and the last token."""
  act = jax.jit(jax.vmap(plate_script.to_plate))
  timesteps = []
  for _ in range(steps):
    token, timestep = pool.step(token, np.asarray(act(obs)))
    obs = timestep.obs
    timesteps.append(timestep)
  return token, timesteps


@pytest.mark.slow
@simulated
def test_the_script_succeeds_and_rewards_add_up_to_those_published(pool):
  _, timesteps = play(pool, *pool.init(np.array([11, 17])), HORIZON)
  done_TN = np.array([x.terminated for x in timesteps])
  reward_TN = np.array([x.reward for x in timesteps])
  for i, last in enumerate(done_TN.argmax(0)):
    assert done_TN[last, i] and timesteps[last].success[i]
    given = reward_TN[: last + 1, i]
    # A grasp; one of five steps; success, at which the episode ends.
    assert given[np.abs(given) > 1e-6] == pytest.approx([0.1, 0.1, 1.0])
    first, fifth, _ = np.flatnonzero(np.abs(given) > 1e-6)
    assert fifth == first + 4


@pytest.mark.slow
@simulated
def test_an_episode_is_restored_to_the_bit_while_the_object_is_held(pool):
  token, obs = pool.init(np.array([3, 8]))
  token, before = play(pool, token, obs, 10)
  snapshot = pool.save(token)
  _, want = play(pool, token, before[-1].obs, 12)
  assert sum(x.reward.sum() for x in before) > 0  # Something is held.
  restored = pool.load(token, snapshot)
  _, got = play(pool, restored, before[-1].obs, 12)
  for x, y in zip(want, got, strict=True):
    assert jax.tree.all(jax.tree.map(np.array_equal, x, y))


@pytest.mark.slow
@simulated
def test_a_seed_has_one_scene_whatever_was_played_before(pool):
  _, one = pool.init(np.array([5, 6]))
  _, two = pool.init(np.array([6, 5]))
  np.testing.assert_array_equal(one, two[::-1])


@pytest.mark.slow
@simulated
def test_pictures_come_with_the_instruction_of_their_episode():
  texts = [kinds.instruction(kind) for kind in kinds.HELD_OUT]
  rows = codes(texts)
  prompts = {
    text: {'token': rows.token[i], 'mask': rows.mask[i]}
    for i, text in enumerate(texts)
  }
  try:
    pool = env_pool.make_pool(
      maniskill.make,
      2,
      task=kinds.TASK,
      kinds='held_out',
      reward_mode='staged',
      images=True,
      image_size=32,
      horizon=1,
      prompts=prompts,
    )
  except simulator.UnavailableError as error:
    assert 'need a Vulkan device' in str(error)
    pytest.skip(str(error))
  said = lambda obs: [
    bytes(row).rstrip(b'\0').decode() for row in obs['prompt']['token']
  ]
  seed = np.array([0, 12])
  token, obs = pool.init(seed)
  assert said(obs) == [texts[0], texts[12 % 9]]
  assert obs['image']['base_camera'].shape == (2, 32, 32, 3)
  _, timestep = pool.step(token, np.zeros((2, 8), np.float32))
  pool.close()
  assert said(timestep.final_obs) == said(obs)
  now = [simulator.episode_seed(int(x), 1) % 9 for x in seed]
  assert said(timestep.obs) == [texts[i] for i in now]
