"""Spaces of Gymnasium as arrays, against Gymnasium's own flattening."""

import jax
import numpy as np
import pytest

from rlinf_jax.envs import gymnasium, simulator

gym = pytest.importorskip(
  'gymnasium',
  reason='Gymnasium is not installed: pip install "rlinf-jax[gymnasium]".',
)
spaces = gym.spaces

CHOICE = spaces.Discrete(4, start=2)
SEVERAL = spaces.MultiDiscrete([3, 2])
NESTED = spaces.Dict(
  {
    'both': spaces.Tuple((CHOICE, spaces.Box(-1, 1, (2, 2)))),
    'bits': spaces.MultiBinary(3),
    'several': SEVERAL,
  }
)


def test_observations_are_flattened_by_name():
  arrays = gymnasium.obs_arrays(NESTED)
  assert jax.tree.map(lambda x: x.shape, arrays, is_leaf=_is_array) == {
    'both': {'0': (4,), '1': (4,)},
    'bits': (3,),
    'several': (5,),
  }
  NESTED.seed(0)
  for _ in range(5):
    obs = NESTED.sample()
    got = gymnasium.read(obs, NESTED)
    for x, part, space in (
      (got['both']['0'], obs['both'][0], CHOICE),
      (got['both']['1'], obs['both'][1], NESTED['both'][1]),
      (got['bits'], obs['bits'], NESTED['bits']),
      (got['several'], obs['several'], SEVERAL),
    ):
      assert x.dtype == np.float32
      np.testing.assert_array_equal(x, spaces.flatten(space, part))


def test_a_slash_in_a_name_separates_it_as_the_pool_does():
  """JAX lists names in order, and a slash is behind a dash there."""
  names = 'arm/at', 'arm-left'
  space = spaces.Dict({name: spaces.Box(-1, 1, (2,)) for name in names})
  obs = {'arm/at': np.zeros(2), 'arm-left': np.ones(2)}
  arrays = jax.tree.map(
    lambda x: 0, gymnasium.obs_arrays(space), is_leaf=_is_array
  )
  got = gymnasium.read(obs, space)
  assert jax.tree.structure(got) == jax.tree.structure(arrays)
  assert jax.tree.structure(got) == jax.tree.structure(
    simulator.tree(simulator.leaves(obs))
  )
  assert got['arm']['at'].tolist() == [0, 0]


@pytest.mark.parametrize(
  'obs, message',
  [
    ({'arm': 0, 'arm/at': 1}, "have 'arm' and 'arm/at', and a part cannot"),
    ({'a/b/c': 0, 'a/b': 1}, "have 'a/b' and 'a/b/c'"),
    ({'arm/at': 0, 'arm': {'at': 1}}, "have the path 'arm/at'"),
  ],
)
def test_names_of_which_one_holds_the_other_are_refused(obs, message):
  with pytest.raises(ValueError, match=message):
    simulator.tree(simulator.leaves(obs))


def _is_array(x):
  return hasattr(x, 'shape')


@pytest.mark.parametrize('space', [CHOICE, SEVERAL])
def test_a_batch_of_choices_is_that_of_each(space):
  space.seed(1)
  samples = [space.sample() for _ in range(6)]
  batch = gymnasium.read(np.stack(samples), space, (6,))
  for x, sample in zip(batch, samples, strict=True):
    np.testing.assert_array_equal(x, spaces.flatten(space, sample))


@pytest.mark.parametrize(
  'space, choices',
  [(CHOICE, (4,)), (SEVERAL, (3, 2)), (spaces.MultiBinary(2), (2, 2))],
  ids=str,
)
def test_actions_are_the_indices_of_choices(space, choices):
  actions = gymnasium.Actions(space)
  assert actions.choices == choices
  assert actions.high.tolist() == [n - 1 for n in choices]
  for index in np.ndindex(*choices):
    action = actions.one(np.array(index, np.float32))
    assert space.contains(action)
    np.testing.assert_array_equal(
      np.ravel(action) - getattr(space, 'start', 0), index
    )


def test_actions_of_a_box_of_integers_are_rounded():
  space = spaces.Box(0, 10, (2, 2), np.uint8)
  action = gymnasium.Actions(space).one(np.array([9.9, 0.4, 1.6, 12.0]))
  assert space.contains(action)
  assert action.tolist() == [[10, 0], [2, 10]]


def test_a_space_of_neither_kind_is_refused():
  with pytest.raises(ValueError, match='must be a Box, Discrete, MultiDisc'):
    gymnasium.Actions(spaces.Text(5))
  one = spaces.Box(0, 1, (1,))
  for space in (spaces.Graph(one, None), spaces.OneOf((one, CHOICE))):
    with pytest.raises(ValueError, match='arrays, choices, or a Dict or Tuple'):
      gymnasium.obs_arrays(space)
