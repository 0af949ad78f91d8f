"""When a run evaluates and saves, and which plan files it reads."""

import re
import types

import pytest

from rlinf_jax import train
from rlinf_jax.run import loop
from rlinf_jax.runtime import flows
from stages import base


def schedule(**fields):
  default = {
    'steps': 10,
    'evaluate_every': 4,
    'checkpoint_every': 3,
    'stop_at_score': None,
    'video_every_evals': 0,
    'max_skipped_steps': 10,
  }
  return loop.Schedule(**default | fields)


def test_evaluations_are_every_few_steps_and_at_the_end():
  found = [n for n in range(1, 11) if schedule().is_evaluation(n)]
  assert found == [4, 8, 10]


def test_without_evaluations_there_is_none_at_the_end_either():
  never = schedule(evaluate_every=0)
  assert not any(map(never.is_evaluation, range(11)))
  assert [never.next_pause(n) for n in (0, 3, 9)] == [3, 6, 10]


def test_a_score_to_stop_at_needs_evaluations(tmp_path):
  nothing = base.Workflow(None, None, None, None)
  with pytest.raises(ValueError, match='evaluate_every = 0 makes none'):
    train.train(
      nothing,
      None,
      workdir=str(tmp_path / 'run'),
      steps=1,
      evaluate_every=0,
      stop_at_score=0.5,
    )
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    (None, r"plan = '.*plan\.json' is neither 'auto' nor a file"),
    ('{"places": ', r'The plan .*plan\.json is not JSON: Expecting value'),
    ('[1, 2]', r'The plan .*plan\.json holds \[1, 2\], and a plan is'),
  ],
)
def test_a_file_that_is_no_plan_is_named(text, message, tmp_path):
  path = tmp_path / 'plan.json'
  if text is not None:
    path.write_text(text)
  with pytest.raises(ValueError) as error:
    flows.read_plan(str(path), ())
  assert re.match(message, str(error.value))


def test_a_plan_for_training_serves_an_evaluation():
  step, evaluate = (
    types.SimpleNamespace(stages=(name,)) for name in ('generate', 'judge')
  )
  options = {'xla_backend_optimization_level': 1}
  sketch = {
    'micro_batch': {'gradient': 4, 'judge': 2},
    'remat': {'gradient': 'nothing_saveable'},
    'offload': ['apply'],
    'pieces': 2,
    'compiler_options': {'gradient': options, 'judge': options},
  }
  with pytest.raises(ValueError, match="for 'gradient'"):
    flows.read_plan(sketch, (step, evaluate))
  plan = flows.read_plan(sketch, (step, evaluate), ignore_others=True)
  assert plan.micro_batch == {'judge': 2} and plan.pieces == 1
  assert plan.compiler_options == {'judge': options}
  assert not plan.remat and not plan.offload


@pytest.mark.parametrize('field', ['stages', 'micro_batch', 'offload'])
@pytest.mark.parametrize('ignore_others', [False, True])
def test_a_field_of_another_type_is_refused_by_name(field, ignore_others):
  flow = types.SimpleNamespace(stages=('generate',))
  with pytest.raises(ValueError, match=f'A plan has {field} 3: give'):
    flows.read_plan({field: 3}, (flow, flow), ignore_others=ignore_others)
