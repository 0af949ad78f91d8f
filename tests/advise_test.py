import functools
import json

import pytest

from planner import cluster as cluster_lib
from planner import plan as plan_lib
from planner.costs import count, roofline
from rlinf_jax import advise
from sharding import rules
from stages import train, workflows
import tiny


def cluster(devices=2, memory=4e9, node=2):
  device = cluster_lib.Device(
    'toy', {'float32': 1e10}, 1e9, memory, 1e10, 5e9, launch=1e-4
  )
  fast, slow = cluster_lib.Link(1e-5, 1e10), cluster_lib.Link(1e-4, 1e9)
  return cluster_lib.Cluster(device, devices, node, fast, slow)


@functools.cache
def flow():
  workflow = workflows.grpo(
    tiny.policy(), tiny.even_on_host, train.adamw(1e-2), group=4, kl=0.1
  )
  return tiny.trace(workflow, tiny.problem())


def advised(tmp_path, **kwargs):
  said, made = [], flow()
  file = tmp_path / 'plan.json'
  own = plan_lib.of({}, made.stages)
  found = advise.advise(
    made, 0, own, cluster=cluster(**kwargs), output=file, say=said.append
  )
  return found, '\n'.join(said), json.loads(file.read_text())


def test_it_names_the_fastest_plan_the_next_and_the_recipes_own(tmp_path):
  found, said, twin = advised(tmp_path)
  assert found.gap == 0 and 'it is proved that none' in said
  assert f'The fastest takes {found.seconds:.3g} s a step' in said
  for words in ('generate', '2 × toy', 'modelled', "The recipe's own plan"):
    assert words in said
  assert plan_lib.of(twin['plan']).stages == found.best.stages
  seconds = [entry['seconds'] for entry in twin['ranked']]
  assert seconds == sorted(seconds) and seconds[0] == found.seconds


def test_the_plan_that_it_finds_can_be_given_to_a_run(tmp_path):
  _, _, twin = advised(tmp_path)
  names = [*flow().stages, 'answer', 'score']  # Of an evaluation as well.
  made = plan_lib.of(twin['plan'], names)
  assert set(made.stages) == {*flow().stages, 'answer', 'score'}


@pytest.mark.slow
def test_what_does_not_fit_is_told_by_the_inequality(tmp_path):
  found, said, _ = advised(tmp_path, memory=1e4)
  assert found.best is None
  assert 'No plan fits in memory' in said and 'too much' in said


@pytest.mark.parametrize('devices, unit', [(2, 1), (8, 2)])
def test_several_nodes_are_shared_out_whole(devices, unit):
  there, made = cluster(devices=devices), flow()
  model = roofline.Roofline(made, count.of_flow(made), there, rules.DEFAULT)
  space = advise.space(made, model, there)
  assert (space.devices, space.unit) == (devices, unit)
  assert set(space.evict) == {'apply', 'refer'}
