"""Walks over a frozen lake: maps, shortest ways and the demonstrator."""

import numpy as np

from rlinf_jax.prepare.agents import frozen_lake


def drawn(held_out, rows=200):
  return frozen_lake.draw(np.random.default_rng(0), rows, held_out)


def test_no_map_is_both_held_out_and_trained_on():
  train, test = (
    {tuple(problem['map']) for problem in drawn(held_out)}
    for held_out in (False, True)
  )
  assert not train & test
  assert len(train) > 190 and len(test) > 180  # Few maps occur twice.


def test_distances_are_those_of_repeated_relaxation():
  """Against Bellman's equation, iterated until nothing changes."""
  for problem in drawn(False, 30):
    lake = problem['map']
    far = np.where([[c == 'H' for c in row] for row in lake], 99, 50)
    far[-1, -1] = 0
    for _ in range(25):
      padded = np.pad(far, 1, constant_values=99)
      near = np.minimum.reduce(
        [padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2]]
        + [padded[1:-1, 2:]]
      )
      far = np.where(far < 99, np.minimum(far, near + 1), far)
    got = frozen_lake.distances(tuple(lake))
    reached = {tuple(x): far[tuple(x)] for x in np.argwhere(far < 50).tolist()}
    assert got == reached and got[0, 0] >= 8


def test_a_demonstrator_without_random_moves_reaches_the_goal():
  rng = np.random.default_rng(1)
  for problem in drawn(False, 30):
    env = frozen_lake.FrozenLake()
    env.reset(problem)
    turns = frozen_lake.script(rng, problem, random_share=0.0)
    steps = [env.step(text) for text in turns]
    assert len(turns) == frozen_lake.distances(tuple(problem['map']))[0, 0]
    assert steps[-1].terminated and steps[-1].reward == 1.0
    assert not any(step.reward for step in steps[:-1])


def test_an_agent_sees_what_lies_next_to_it():
  env = frozen_lake.FrozenLake()
  lake = ['SFHFF', 'FHFFF', 'FFFHF', 'FFFFF', 'HFFFG']
  (first,) = env.reset({'map': lake})
  assert first['content'] == '0,0 EFFE'
  said = [env.step(move) for move in ('left', 'down', 'down', 'right')]
  seen = ['0,0 EFFE', '1,0 EFHS', '2,0 EFFF', '2,1 FFFH']
  assert [step.messages[0]['content'] for step in said] == seen
  assert env.step('up').terminated


def test_half_of_the_moves_at_random_seldom_reach_it():
  rng, reached = np.random.default_rng(2), 0.0
  for problem in drawn(False):
    env = frozen_lake.FrozenLake()
    env.reset(problem)
    for text in frozen_lake.script(rng, problem):
      step = env.step(text)
      if step.terminated:
        break
    reached += step.reward
  assert 0.2 < reached / 200 < 0.45
