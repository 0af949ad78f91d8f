import dataclasses
import functools

import pytest

from planner import formatting
from planner.costs import roofline
from planner.counting import count
from planner.ir import plan as plan_lib
from rlinf_jax import train
from rlinf_jax.config import config, config_values
from rlinf_jax.planning import autoplan, remedies
from rlinf_jax.runtime import flows as flows_lib
from sharding import rules
from tests.rlinf_jax.planning import plan_report_test

RECIPE = 'experiments/compiled/grpo.gin'
BINDINGS = (
  "huggingface.policy.remat = 'none'",
  'GROUPS = 2',
  'GROUP = 4',
  'PROMPT = 8',
  'LENGTH = 64',
)


@pytest.fixture
def recipe(tmp_path):
  """The flow of two layers of Qwen2.5 in miniature, from a gin file."""
  (tmp_path / 'config.json').write_text(
    '{"model_type": "qwen2", "hidden_size": 32, "intermediate_size": 64, '
    '"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, '
    '"num_hidden_layers": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e4, '
    '"tie_word_embeddings": true, "max_position_embeddings": 128}'
  )
  bindings = [*BINDINGS, f'CHECKPOINT = {str(tmp_path)!r}']
  config.parse([RECIPE], bindings, str(tmp_path))
  return config.call(flows_lib.trace_flows, bindings_of=train.train)[0]


@functools.cache
def works(flow):
  return count.of_flow(flow)


def model(flow, memory):
  cluster = plan_report_test.cluster(devices=1, memory=memory)
  return roofline.Roofline(flow, works(flow), cluster, rules.DEFAULT)


def test_bindings_that_would_help_are_named_as_the_recipe_names_them(recipe):
  plan = plan_lib.one_place(recipe.stages)
  need = max(model(recipe, 1e9).memory(recipe, plan, 'all').values())
  lacks, bindings = remedies.shortage(recipe, model(recipe, need * 0.998), plan)
  assert lacks.startswith('all lacks') and 'during gradient' in lacks
  assert 'activations' in lacks
  assert bindings[0].startswith("huggingface.policy.remat = 'auto'")
  said = ' '.join(bindings)
  for name in ('micro_batch of 4 rows instead of 8', 'GROUPS below 2'):
    assert name in said
  smaller = dataclasses.replace(plan, micro_batch={'gradient': 4})
  saved = need - model(recipe, 1e9).memory(recipe, smaller, 'all')['gradient']
  assert f'saves {formatting.byte_size(saved)}' in said
  assert 'kl_coef' not in said  # There is no reference.
  assert config_values.read('response_length') == {'LENGTH': 64}


def test_what_a_compiler_refuses_has_the_bindings_that_save_as_much(recipe):
  """The model has room for the plan, and the compiler has not."""
  plan, costs = plan_lib.one_place(recipe.stages), model(recipe, 1e9)
  need = costs.memory(recipe, plan, 'all')
  assert max(need.values()) < costs.capacity
  smaller = dataclasses.replace(plan, micro_batch={'gradient': 4})
  saved = need['gradient'] - costs.memory(recipe, smaller, 'all')['gradient']
  for lacks, helps in ((0.99 * saved, True), (1.01 * saved, False)):
    refused = remedies.Refused('gradient', lacks)
    words, bindings = remedies.shortage(recipe, costs, plan, refused)
    size = formatting.byte_size(lacks)
    assert words.startswith(f'all lacks {size} on each device during gradient')
    assert helps == any('micro_batch of 4 rows' in x for x in bindings)
  apply = remedies.Refused('apply', 1.0)
  assert 'during apply' in remedies.shortage(recipe, costs, plan, apply)[0]


def test_a_length_that_a_recipe_leaves_open_is_no_number(recipe, monkeypatch):
  plan = plan_lib.one_place(recipe.stages)
  costs = model(recipe, 1e9)
  costs.capacity = 0.998 * max(costs.memory(recipe, plan, 'all').values())
  before = remedies.shortage(recipe, costs, plan)
  read = config_values.read
  left_open = {'source.prompt_length': None}
  monkeypatch.setattr(
    config_values, 'read', lambda name: read(name) | left_open
  )
  lacks, bindings = remedies.shortage(recipe, costs, plan)
  assert lacks == before[0] and 'None' not in ' '.join(bindings)


def test_frozen_weights_beside_an_adapter_are_no_reference(recipe, monkeypatch):
  """The reference is what no other stage than that of the KL term reads."""
  monkeypatch.setattr(config_values, 'read', lambda parameter: {'KL': 0.1})
  (gradient,) = (node for node in recipe.nodes if node.name == 'gradient')
  stage = dataclasses.replace(gradient.stage, name='ref_logp')
  score = dataclasses.replace(gradient, stage=stage)
  frozen = tuple((start, start) for start, _ in recipe.carry)
  kept = {}
  for others in (), (gradient,):
    flow = dataclasses.replace(recipe, carry=frozen, nodes=(*others, score))
    plan = plan_lib.one_place(flow.stages)
    costs = model(recipe, 1e9)
    kept[others] = list(remedies._reference(flow, costs, plan, 'all', 1.0))
  assert kept[()][0].startswith('KL = 0 keeps no reference (')
  assert not kept[gradient,]


def test_bindings_that_save_too_little_are_left_out(recipe):
  plan = plan_lib.one_place(recipe.stages)
  _, bindings = remedies.shortage(recipe, model(recipe, 1e3), plan)
  assert not bindings


def test_a_run_without_a_plan_says_whether_that_is_proved(recipe, monkeypatch):
  costs = model(recipe, 1e3)
  for seconds, words in ((60, r'\(proved\).*lacks'), (0, 'not proved that')):
    monkeypatch.setattr(autoplan, 'SECONDS', 0.0)
    monkeypatch.setattr(autoplan, 'PATIENCE', float(seconds))
    with pytest.raises(ValueError, match=words):
      autoplan.search(recipe, recipe, 0, costs)
