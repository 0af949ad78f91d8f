"""A run that finds its plan, and another when stages are not as they were."""

import dataclasses
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner import cluster as cluster_lib
from planner.costs import measured as measured_lib
from planner.costs import roofline
from planner.counting import count
from planner.ir import plan as plan_lib
from planner.simulation import evaluate_plan
from rlinf_jax import train
from rlinf_jax.planning import autoplan, monitor
from rlinf_jax.planning.profiling import machine_profile
from rlinf_jax.planning.profiling import stage_profile as profile
from rlinf_jax.report import predicted
from rlinf_jax.run import setup
from rlinf_jax.runtime import flows as flows_lib
from rlinf_jax.runtime import programs
from rlinf_jax.runtime.ray import connection, resources
from sharding import rules
import stages
from stages import base, metrics

ROWS, STEPS, CHANGE = 8, 30, 4
SECONDS = {'act': 0.05, 'judge': 0.05, 'learn': 0.1}


def like(x):
  return x


act = stages.Stage(like, 'act', host=True, out_shapes=like)
judge = stages.Stage(like, 'judge', host=True, out_shapes=like)
learn = stages.Stage(
  lambda x_B: x_B.sum(dtype=np.int32),
  'learn',
  'sum',
  host=True,
  out_shapes=lambda x: jax.ShapeDtypeStruct((), jnp.int32),
)


@stages.stage('apply', 'batch')
def apply(state, total):
  w = 0.9 * state['w'] + jnp.sin(total.astype(jnp.float32))
  return {'w': w}, {'train/loss': metrics.mean(w)}


@stages.stage('examine', 'batch')
def examine(state, x_B):
  return {'eval/loss': metrics.mean(state['w'] + 0 * x_B.sum())}


def step(state, x_B, key):
  del key
  return apply(state, learn(judge(act(x_B))))


WORKFLOW = base.Workflow(
  lambda key: {'w': jnp.zeros(())},
  step,
  lambda state, x_B, key: examine(state, x_B),
  lambda state: state,
)


def batch(i):
  return np.arange(i * ROWS, (i + 1) * ROWS, dtype=np.int32)


SOURCE = base.Source(
  lambda seed: {'i': np.array(0)},
  lambda s, told: ({'i': np.asarray(s['i'] + 1)}, batch(int(s['i']))),
  lambda: [batch(0)],
  lambda token, mask: [],
)


def two_devices():
  device = cluster_lib.Device(
    'toy', {'float32': 1e10}, 1e9, 1e9, 1e10, 1e10, launch_seconds=1e-4
  )
  link = cluster_lib.Link(1e-4, 1e9)
  return cluster_lib.Cluster(device, 2, 2, link, link)


def known(**others):
  curves = {
    (name, 1, ()): measured_lib.RowCurve(
      tuple((n, n * seconds / ROWS) for n in (1, 4, ROWS))
    )
    for name, seconds in (SECONDS | others).items()
  }
  return measured_lib.Measurements(curves)


def flows():
  return flows_lib.trace_flows(WORKFLOW, SOURCE, 0)


def model(**others):
  flow = flows()[0]
  return roofline.Roofline(
    flow, count.of_flow(flow), two_devices(), rules.DEFAULT, known(**others)
  )


def run(folder, **kwargs):
  return train.train(
    WORKFLOW,
    SOURCE,
    workdir=str(folder),
    steps=STEPS,
    evaluate_every=STEPS,
    checkpoint_every=STEPS,
    **kwargs,
  )


def losses(folder):
  lines = (folder / 'metrics.jsonl').read_text().splitlines()
  records = {x['step']: x for x in map(json.loads, lines) if 'train/loss' in x}
  return [records[i]['train/loss'] for i in range(1, STEPS + 1)]


@pytest.fixture
def measured(monkeypatch):
  monkeypatch.setattr(
    machine_profile, 'measure_cluster', lambda store: two_devices()
  )
  monkeypatch.setattr(profile, 'measure', lambda *args, **_: known())


@pytest.fixture
def act_becomes_slower(monkeypatch):
  """Steps take what the model says, with an `act` that is slower from some on.

  Their seconds on this machine, where no stage takes any, are not looked at.
  """
  update, step_flow = monitor.PlanMonitor.update, flows()[0]
  later = itertools.repeat(model(act=3 * SECONDS['act']))
  costs = itertools.chain([model()] * CHANGE, later)

  def told(watch, step, by_stage):
    plan = watch.chosen.plan
    now = autoplan.predict_step(step_flow, 0, next(costs), plan)
    by_stage = {name: found.value for name, found in now.stages.items()}
    return update(watch, now.step, by_stage)

  monkeypatch.setattr(monitor.PlanMonitor, 'update', told)


def test_a_stage_that_becomes_slower_moves_others_away(
  tmp_path, measured, act_becomes_slower, capsys
):
  run(tmp_path / 'auto')
  run(tmp_path / 'one', plan=None)
  assert losses(tmp_path / 'auto') == losses(tmp_path / 'one')
  output = capsys.readouterr().out
  assert 'Plan:' in output and 'did not take as long as predicted' in output
  found = plan_lib.Plan.from_json((tmp_path / 'auto/plan.json').read_text())
  assert found.stages['act'] != found.stages['judge']
  assert found.stages['judge'] == found.stages['learn']
  lines = (tmp_path / 'auto/predictions.jsonl').read_text().splitlines()
  steps = [json.loads(line)['step'] for line in lines]
  assert steps[0] == 0 and steps[-1] >= CHANGE
  names = [row.name for row in predicted.table(tmp_path / 'auto')]
  assert {*SECONDS} <= {*names}


def test_before_the_change_what_is_equally_long_is_together():
  step, evaluate = flows()
  costs = model()
  chosen = autoplan.search(step, evaluate, 0, costs)
  assert chosen.plan.stages['act'] == chosen.plan.stages['judge']
  assert chosen.plan.stages['act'] != chosen.plan.stages['learn']
  assert chosen.plan.pieces > 1 and chosen.gap == 0
  assert chosen.prediction.stages['act'] == (
    pytest.approx(SECONDS['act']),
    'measured',
  )
  # An evaluation runs where what it reads is.
  assert chosen.plan.stages['examine'] == chosen.plan.stages['apply']


def watched():
  both_flows = flows()
  costs = model()
  chosen = autoplan.search(*both_flows, 0, costs)
  return monitor.PlanMonitor(both_flows, 0, chosen, make_runtime=None), chosen


def replan(watch, step, by_stage, times=2 * monitor.WINDOW):
  for _ in range(times):
    better = watch.update(step, by_stage)
    if better:
      return better
  return None


def test_a_run_takes_the_order_that_the_search_simulated():
  made, costs = flows(), model()
  sketch = {
    'places': {'a': {'devices': [0]}, 'b': {'devices': [1]}},
    'stages': {'judge': 'b', '*': 'a'},
    'pieces': 4,
  }
  plan = plan_lib.parse(sketch, two_flows())
  simulated = evaluate_plan.evaluate(made[0], costs, plan)
  predicted_step = autoplan.predict_step(made[0], 0, costs, plan)
  chosen = autoplan.ChosenPlan(plan, costs, predicted_step, 0.0)
  watch = monitor.PlanMonitor(
    made, 0, chosen, lambda plan: types.SimpleNamespace(plan=plan, timeline=())
  )
  # As the driver sends it to other processes, and as plan.json has it.
  sent = plan_lib.Plan.from_json(watch.runtime().plan.to_json())
  lowered = programs.lower(sent, *made)['step']
  assert lowered.flow.nodes == simulated.flow.nodes
  assert lowered.programs == simulated.programs
  assert programs.lower(plan, *made)['step'].programs != simulated.programs


def test_a_model_that_is_nearly_true_is_left_alone():
  watch, chosen = watched()
  assert replan(watch, 1.2 * chosen.prediction.step, SECONDS) is None
  assert watch.chosen is chosen


def test_a_machine_that_is_slower_throughout_keeps_its_plan():
  watch, chosen = watched()
  slower = {name: 2 * seconds for name, seconds in SECONDS.items()}
  assert replan(watch, 2 * chosen.prediction.step, slower) is None
  assert watch.chosen.plan == chosen.plan
  now = watch.chosen.prediction
  assert now.step == pytest.approx(2 * chosen.prediction.step, rel=0.1)
  assert now.stages['act'].value == pytest.approx(2 * SECONDS['act'])
  # It is believed from now on.
  before = watch.chosen
  assert replan(watch, now.step, slower) is None and watch.chosen is before


def test_what_no_stage_explains_is_not_searched_for_again(monkeypatch):
  watch, chosen = watched()
  monkeypatch.setattr(autoplan, 'search', lambda *args: 1 / 0)
  for _ in range(2):  # Stages are as predicted, a step is not.
    assert replan(watch, 3 * chosen.prediction.step, SECONDS) is None
  assert watch.chosen is chosen


def test_a_slower_plan_says_how_much_faster_another_might_be(monkeypatch):
  watch, chosen = watched()
  monkeypatch.setattr(monitor, 'GAIN', 0.0)  # The plan that is found stays.
  slower = SECONDS | {'act': 3 * SECONDS['act']}
  assert replan(watch, 2 * chosen.prediction.step, slower) is None
  now = watch.chosen
  assert now.plan == chosen.plan
  best = autoplan.search(*flows(), 0, now.model)
  assert now.gap == pytest.approx(
    1 - best.prediction.step / now.prediction.step
  )
  assert now.gap > 0.05


def test_a_search_that_finds_no_plan_leaves_the_run_its_own():
  watch, chosen = watched()
  small = dataclasses.replace(two_devices(), memory_reserve=1 - 1e-9)
  flow = flows()[0]
  costs = roofline.Roofline(
    flow, count.of_flow(flow), small, rules.DEFAULT, known()
  )
  watch.chosen = dataclasses.replace(chosen, model=costs)
  slower = SECONDS | {'act': 3 * SECONDS['act']}
  assert replan(watch, 2 * chosen.prediction.step, slower) is None
  now = watch.chosen
  assert now.plan == chosen.plan and now.gap == 1
  assert now.prediction.stages['act'].value == pytest.approx(slower['act'])
  assert 'of which nothing is proved' in watch.summary()


def test_the_first_step_compiles_and_is_not_counted():
  watch, chosen = watched()
  watch.update(100 * chosen.prediction.step, SECONDS)
  assert replan(watch, chosen.prediction.step, SECONDS) is None
  assert watch.chosen is chosen


def test_what_one_device_cannot_hold_is_planned_by_the_model(
  tmp_path, measured, monkeypatch, capsys
):
  monkeypatch.setattr(machine_profile, 'memory', lambda: 1.0)
  monkeypatch.setattr(profile, 'measure', lambda *args, **_: 1 / 0)
  train.train(WORKFLOW, SOURCE, workdir=str(tmp_path / 'auto'), steps=1)
  assert 'one device cannot hold the state' in capsys.readouterr().out


def test_a_run_goes_on_by_the_plan_that_it_found(tmp_path, measured):
  folder = tmp_path / 'auto'
  train.train(
    WORKFLOW, SOURCE, workdir=str(folder), steps=2, checkpoint_every=2
  )
  (folder / 'result.json').unlink()
  kept = plan_lib.parse(
    {'places': {'mine': {'devices': [1]}}}, dict.fromkeys(two_flows())
  )
  (folder / 'plan.json').write_text(kept.to_json())
  train.train(
    WORKFLOW,
    SOURCE,
    workdir=str(folder),
    steps=4,
    checkpoint_every=2,
    resume=True,
  )
  assert plan_lib.Plan.from_json((folder / 'plan.json').read_text()) == kept


def two_flows():
  return [name for flow in flows() for name in flow.stages]


def test_what_fits_nowhere_is_told():
  both_flows = flows()
  costs = model()
  costs.capacity = 1.0
  with pytest.raises(ValueError, match=r'No plan fits.*nearest.*bind a plan'):
    autoplan.search(*both_flows, 0, costs)


def test_stages_are_measured_with_ray_on_cpus_alone(monkeypatch):
  monkeypatch.setattr(connection, 'connect', lambda address: None)
  monkeypatch.setattr(resources, 'device_kind', lambda: 'CPU')
  setup.connect('local', 'auto')
  monkeypatch.setattr(resources, 'device_kind', lambda: 'GPU')
  setup.connect('local', None)  # One place needs no measurements.
  with pytest.raises(ValueError, match='on CPUs alone.* a GPU: bind a plan'):
    setup.connect('local', 'auto')
