"""Algorithm 1 pipelines as its formula says, never faster than the search."""

import dataclasses
import itertools

import numpy as np
import pytest

from planner.ir import graph
from planner.search import algorithm1, exact
from planner.search.plans import space as space_lib
import toys


def test_algorithm_1_pipelines_as_its_formula_says():
  flow, model = toys.line({'a': 4.0, 'b': 4.0}, power=0.0)
  found = algorithm1.algorithm1(flow, model, space_lib.Space(2, pieces=(1, 4)))
  assert found.best.pieces == 4
  assert found.seconds == pytest.approx(2 + 3 * 1)
  assert (found.bound, found.gap) == (None, None)


def test_algorithm_1_refuses_spaces_without_a_single_place():
  flow, model = toys.line({'a': 1.0, 'b': 1.0})
  with pytest.raises(ValueError, match='plans of 2 places or more'):
    algorithm1.algorithm1(flow, model, space_lib.Space(4, min_places=2))


def test_algorithm_1_treats_a_cycle_as_one_stage():
  # An update between two gradients: one cannot be cut from the other.
  flow = toys.build(
    [
      ('generate', 'row', ('batch', 'state.apply')),
      ('gradient', 'sum', ('generate', 'state.apply')),
      ('apply', 'batch', ('gradient', 'state.apply')),
    ],
    ('apply',),
  )
  again = [
    graph.Node(flow.nodes[1].stage, (2, 4), (5,), frozenset({2})),
    graph.Node(flow.nodes[2].stage, (5, 4), (6,)),
  ]
  flow = dataclasses.replace(
    flow,
    nodes=(*flow.nodes, *again),
    values=(*flow.values, toys.value(), toys.value()),
    carry=((1, 6),),
    outputs=(6,),
  )
  model = toys.Synthetic(
    {'generate': 4.0, 'gradient': 2.0, 'apply': 0.0}, power=0.0
  )
  found = algorithm1.algorithm1(flow, model, space_lib.Space(3, pieces=(1, 2)))
  stages = found.best.stages
  assert stages['gradient'] == stages['apply'] != stages['generate']


def test_algorithm_1_is_never_faster_than_the_search():
  flow, model = toys.ppo(power=0.6, move=0.5, meshes=2)
  space = space_lib.Space(64, unit=8, pieces=(1, 2, 4))
  found = exact.search(flow, model, space)
  other = algorithm1.algorithm1(flow, model, space)
  assert found.seconds <= other.seconds
  assert found.bound <= other.seconds


@pytest.mark.parametrize('seed', range(30))
def test_algorithm_1_of_one_piece_is_the_best_of_all_cuts(seed):
  # With one piece the formula is the sum of all places' seconds. Stages that
  # can use one device only make it worth while to cut.
  rng = np.random.default_rng(seed)
  work = dict(zip('abcd', rng.uniform(1, 9, 4).tolist(), strict=True))
  alone = [stage for stage in work if rng.random() < 0.5]
  flow, model = toys.line(work, power=0.9, alone=alone)
  devices, places = 6, 4

  def seconds(block, units):
    if units > 1 and not set(alone).isdisjoint(block):
      return np.inf
    return sum(work[stage] for stage in block) / units**0.9

  def plans():
    for n in range(1, places + 1):
      for cuts in itertools.combinations(range(1, 4), n - 1):
        edges = (0, *cuts, 4)
        blocks = ['abcd'[i:j] for i, j in itertools.pairwise(edges)]
        for units in itertools.product(range(1, devices + 1), repeat=n):
          if sum(units) <= devices:
            yield sum(map(seconds, blocks, units))

  space = space_lib.Space(devices, pieces=(1,), max_places=places)
  found = algorithm1.algorithm1(flow, model, space)
  assert found.seconds == pytest.approx(min(plans()))
