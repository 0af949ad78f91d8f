"""A run that gives generation a second mesh of its own accord."""

import dataclasses
import json

import numpy as np
import pytest

from planner.costs import measured
from planner.ir import plan as plan_lib
from rlinf_jax import train
from rlinf_jax.planning import autoplan, monitor
from rlinf_jax.planning.profiling import machine_profile
from rlinf_jax.planning.profiling import stage_profile as profile
from rlinf_jax.report import predicted
from stages import base
from tests.rlinf_jax.planning import searches_test
import tiny

STEPS = 4
COMPUTED = 'train/', 'rollout/'
SOURCE = base.Source(
  lambda seed: {'i': np.array(0)},
  lambda s, told: (
    {'i': np.asarray(s['i'] + 1)},
    tiny.problem(seed=int(s['i'])),
  ),
  lambda: [tiny.problem(seed=99)],
  lambda token, mask: [''] * len(token),
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('in_float64')]


@pytest.fixture(scope='module')
def one_search():
  """A search of which all runs take the plan: they have the same costs."""
  search, found = autoplan.search, []

  def once(*args):
    if not found:
      found.append(search(*args))
    return found[0]

  return once


@pytest.fixture
def toy_costs(monkeypatch, one_search):
  """Seconds are those of two slow devices, and nothing is measured."""
  monkeypatch.setattr(autoplan, 'search', one_search)
  monkeypatch.setattr(
    machine_profile, 'measure_cluster', lambda store: searches_test.cluster()
  )
  monkeypatch.setattr(
    profile, 'measure', lambda *_, **__: measured.Measurements()
  )


def run(folder, steps=STEPS, **kwargs):
  train.train(
    searches_test.workflow('float64'),
    SOURCE,
    workdir=str(folder),
    steps=steps,
    evaluate_every=2,
    checkpoint_every=2,
    **kwargs,
  )
  lines = (folder / 'metrics.jsonl').read_text().splitlines()
  return [*map(json.loads, lines)]


def numbers(records):
  """The metrics that each step computed."""
  return [
    {name: x for name, x in record.items() if name.startswith(COMPUTED)}
    for record in records
    if 'time/step' in record
  ]


def plan_of(folder):
  return plan_lib.Plan.from_json((folder / 'plan.json').read_text())


def test_it_computes_what_other_plans_do_and_goes_on_by_its_plan(
  tmp_path, toy_costs, capsys, monkeypatch
):
  folder = tmp_path / 'auto'
  run(folder, steps=2)
  plan = plan_of(folder)
  assert plan.shared_devices == ('all', 'generation')
  assert len({place.axes for place in plan.places.values()}) == 2
  assert {place.devices for place in plan.places.values()} == {(0, 1)}
  header = capsys.readouterr().out
  assert 'devices shared by all generation' in header
  assert 'no plan with one mesh on each device is faster (proved)' in header
  rows = {row.name: row for row in predicted.table(folder)}
  assert rows['step'].ratio > 0
  assert rows[measured.HOST_MOVES].measured > 0

  # It is resumed by the same plan, and without a search.
  (folder / 'result.json').unlink()
  monkeypatch.setattr(autoplan, 'search', lambda *args: 1 / 0)
  got = run(folder, resume=True)
  assert plan_of(folder) == plan

  # The same meshes on other devices compute the same bits.
  apart = dataclasses.replace(plan, shared_devices=(), places=plan.places | {
    'generation': dataclasses.replace(plan.places['generation'], devices=(2, 3))
  })  # fmt: skip
  (tmp_path / 'apart.json').write_text(apart.to_json())
  want = run(tmp_path / 'apart', plan=str(tmp_path / 'apart.json'))
  assert numbers(got) == numbers(want) and len(numbers(got)) == STEPS


def test_a_run_may_leave_its_second_mesh(tmp_path, toy_costs, monkeypatch):
  """And goes on with the state from both meshes."""
  found = []

  def update(self, *args):
    """One mesh after two steps."""
    found.append(self.chosen.plan)
    if len(found) != 2:
      return None
    plan = dataclasses.replace(
      self.chosen.plan,
      places={'all': self.chosen.plan.places['all']},
      stages=dict.fromkeys(self.chosen.plan.stages, 'all'),
      shared_devices=(),
      order=(),
    )
    self.chosen = dataclasses.replace(self.chosen, plan=plan)
    return self.chosen

  monkeypatch.setattr(monitor.PlanMonitor, 'update', update)
  got = run(tmp_path / 'auto')
  assert (
    found[0].shared_devices and not plan_of(tmp_path / 'auto').shared_devices
  )
  want = run(tmp_path / 'one', plan=None)
  for mine, its in zip(numbers(got), numbers(want), strict=True):
    assert mine.keys() == its.keys() and 'train/grad_norm' in mine
    for name, x in mine.items():  # Rewards are float32.
      rtol = 1e-8 if name.startswith('train/') else 1e-6
      np.testing.assert_allclose(x, its[name], rtol, 1e-12, err_msg=name)
