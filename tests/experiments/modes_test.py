"""Agreement of the cost model with published choices of mode.

The table is pinned, disagreements too: experiments/modes says why they are.
"""

import numpy as np
import pytest

from experiments.modes import flows, published, replay
from planner.costs import work
from planner.costs.decoding import contexts, decode
from planner.search.plans import space as space_lib

# Of the modes that the paper tried: whether the model agrees on the fastest.
AGREE = {
  'GRPO, Qwen2.5-7B': (True, True, True),
  'PPO, Qwen2.5-1.5B': (True, True, True),
  'PPO, Qwen2.5-7B': (True, True, True),
  'PPO, Qwen2.5-14B': (True, True, True),
  'GRPO, Qwen3-30B-A3B': (False, False, True),
  'PPO, OpenVLA, ManiSkill': (False, False, False),
  'GRPO, OpenVLA-OFT, LIBERO': (True, True, True),
}
CASES = {case.name: case for case in published.CASES}
ALL = [
  (name, devices, agree)
  for name, agrees in AGREE.items()
  for devices, agree in zip(CASES[name].devices, agrees, strict=True)
]
QUICK = [
  some
  for some in ALL
  if 'A3B' in some[0] or some[:2] in (
    ('GRPO, Qwen2.5-7B', 256), ('PPO, Qwen2.5-1.5B', 64),
    ('PPO, OpenVLA, ManiSkill', 8), ('GRPO, OpenVLA-OFT, LIBERO', 8),
  )
]  # fmt: skip


def check(name, devices, agree):
  found = replay.replay(CASES[name], devices)
  assert found.agrees == agree, found
  return found


@pytest.mark.slow
@pytest.mark.parametrize('name, devices, agree', QUICK)
def test_the_table_of_modes_is_as_documented(name, devices, agree):
  check(name, devices, agree)


@pytest.mark.claims
@pytest.mark.parametrize(
  'name, devices, agree', [some for some in ALL if some not in QUICK]
)
def test_the_rest_of_the_table_is_as_documented(name, devices, agree):
  check(name, devices, agree)


def test_spatial_needs_an_engine_that_hands_on_what_has_ended():
  case = CASES['PPO, Qwen2.5-1.5B']
  assert replay.replay(case, 64).modeled_fastest == 'spatial'
  assert replay.replay(case, 64, engine=False).modeled_fastest == 'temporal'


@pytest.mark.parametrize('case', published.CASES[:-2])
def test_lengths_have_the_published_mean_and_most(case):
  lengths = published.lengths(case.tokens, case.max_tokens)
  assert lengths.mean() == pytest.approx(case.tokens, rel=1e-3)
  assert lengths.max() <= case.max_tokens


def test_modes_are_numbers_of_places():
  workload = flows.workload(CASES['GRPO, Qwen2.5-7B'], 512, 80e9)
  spaces = replay.spaces(64, workload)
  assert {mode: (s.min_places, s.max_places) for mode, s in spaces.items()} == {
    'temporal': (1, 1),
    'spatial': (3, 3),
    'hybrid': (2, 2),
  }


def test_models_are_as_large_as_published():
  for case in published.CASES:
    workload = flows.workload(case, case.rows[0], 80e9)
    (params,) = [v for v in workload.flow.values if v.name == 'params']
    size = np.prod(params.shape) / case.model.parameters
    assert size == pytest.approx(1, rel=1e-3)


def test_more_places_than_there_may_be_are_refused():
  with pytest.raises(ValueError, match='3 to 2 places'):
    space_lib.Space(4, max_places=2, min_places=3)


def test_without_an_engine_rows_that_have_ended_are_computed_too():
  column = [contexts.ColumnReads(work.Work(bytes_moved=1.0))]
  step = work.StageWork(work.NONE)

  def loop(*lengths):
    one = decode.DecodeWork(lengths, step, column, context=5.0, engine=True)
    return replay._all_at_once(one).step.per_row.bytes_moved

  assert loop(10, 100) == loop(100, 100) == 55.0
