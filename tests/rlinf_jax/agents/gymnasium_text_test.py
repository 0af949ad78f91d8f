"""Environments of Gymnasium in words, against Gymnasium itself."""

import gymnasium
import numpy as np
import pytest

from rlinf_jax.agents import gymnasium_text

WORDS = ('left', 'down', 'right', 'up')
LAKE = {'actions': WORDS, 'make': {'is_slippery': True}}


class Echo(gymnasium.Env):
  """An environment with spaces of texts, which says what it is told."""

  observation_space = gymnasium.spaces.Text(8)
  action_space = gymnasium.spaces.Text(8, min_length=1)

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    return (options or {}).get('begin', 'hello'), {}

  def step(self, action):
    return action, len(action) / 8, action == 'bye', False, {}


@pytest.fixture
def echo():
  gymnasium.register('Echo-v0', entry_point=Echo)
  yield 'Echo-v0'
  del gymnasium.registry['Echo-v0']


@pytest.mark.parametrize('seed', range(3))
def test_walks_are_those_of_gymnasium(seed):
  """Also where chance decides: the seed is the problem's."""
  plain = gymnasium.make('FrozenLake-v1', **LAKE['make'])
  env = gymnasium_text.GymnasiumText('FrozenLake-v1', **LAKE)
  want, _ = plain.reset(seed=seed)
  (first,) = env.reset({'seed': seed})
  assert first == {'role': 'user', 'content': str(want)}
  for action in np.random.default_rng(seed).integers(0, 4, 50):
    want, reward, terminated, truncated, _ = plain.step(action)
    got = env.step(f' {WORDS[action].upper()}\n')
    assert got.messages[0]['content'] == str(want)
    assert got[1:4] == (reward, terminated, truncated)
    if terminated or truncated:
      return
  raise AssertionError('No walk of 50 random moves ends on the ice.')


def test_an_environment_is_closed_with_its_episode(echo, monkeypatch):
  closed = []
  monkeypatch.setattr(Echo, 'close', lambda _: closed.append(1))
  env = gymnasium_text.GymnasiumText(echo)
  env.reset({})
  env.reset({})
  assert len(closed) == 1
  del env
  assert len(closed) == 2


def test_a_turn_that_is_no_action_changes_nothing():
  env = gymnasium_text.GymnasiumText('FrozenLake-v1', **LAKE)
  other = gymnasium_text.GymnasiumText('FrozenLake-v1', **LAKE)
  env.reset({})
  other.reset({'seed': 0})
  said = env.step('jump')
  assert said.messages[0]['content'] == (
    'error: this is no action, write one of left, down, right, up'
  )
  assert said.terms == {'invalid_actions': 1.0} and said.reward == 0.0
  for _ in range(5):
    assert env.step('right') == other.step('right')


def test_ansi_is_what_the_environment_renders():
  make = {'render_mode': 'ansi'}
  plain = gymnasium.make('Taxi-v4', **make)
  plain.reset(seed=5)
  env = gymnasium_text.GymnasiumText('Taxi-v4', make=make)
  assert env.reset({'seed': 5})[0]['content'] == plain.render()
  plain.step(1)
  assert env.step('1').messages[0]['content'] == plain.render()


def test_spaces_of_texts_take_turns_as_they_are(echo):
  env = gymnasium_text.GymnasiumText(echo, system_prompt='Talk.')
  said = env.reset({'options': {'begin': 'hi'}})
  assert [message['content'] for message in said] == ['Talk.', 'hi']
  assert env.step('four').reward == 0.5
  assert env.step('bye').terminated
  assert env.step('much too long').terms == {'invalid_actions': 1.0}


@pytest.mark.parametrize(
  'task, words, message',
  [
    ('FrozenLake-v1', WORDS[:3], 'has 4 actions and was given the words'),
    ('FrozenLake-v1', ('up',) * 4, 'give 4 different ones'),
    ('Pendulum-v1', None, 'which no words name'),
  ],
)
def test_actions_without_words_are_refused(task, words, message):
  env = gymnasium_text.GymnasiumText(task, actions=words)
  with pytest.raises(ValueError, match=message):
    env.reset({})
