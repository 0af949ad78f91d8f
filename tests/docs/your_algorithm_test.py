"""The page on algorithms of one's own: its code learns, under any plan."""

import pathlib
import re

import jax
import numpy as np
import pytest

import in_memory
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import local
import tiny

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / 'docs' / 'your_algorithm.md'


@pytest.fixture(scope='module')
def page():
  """Names that the page's Python blocks define."""
  namespace = {}
  for block in re.findall('```python\n(.*?)```', PAGE.read_text(), re.DOTALL):
    exec(block, namespace)
  return namespace


@pytest.mark.slow
def test_the_algorithm_of_the_page_learns(page):
  rewards = page['rewards']
  assert rewards[0] < 0.7 < 0.85 < np.mean(rewards[-3:])


@pytest.mark.slow
def test_a_plan_of_two_places_changes_no_bit_of_it(page):
  workflow, problem = page['workflow'], page['problem']
  key = jax.random.key(1)
  state = workflow.init(key)
  flow = flow_lib.trace(workflow.step, state, problem, key)
  sketch = {
    'places': {'actor': {'devices': [0]}, 'learner': {'devices': [1]}},
    'stages': {'generate': 'actor', '*': 'learner'},
  }
  plan = plan_lib.parse(sketch, flow.stages)
  runtime = local.LocalRuntime(plan, step=flow)
  in_memory.start(runtime, state)
  got = runtime.step(problem, key)
  state, want = workflow.step(state, problem, key)
  tiny.assert_same_bits((got, in_memory.state(runtime)), (want, state))
  runtime.close()


def test_the_template_fits_on_a_page():
  path = ROOT / 'stages' / 'workflows' / 'reinforce.py'
  assert len(path.read_text().splitlines()) <= 60
