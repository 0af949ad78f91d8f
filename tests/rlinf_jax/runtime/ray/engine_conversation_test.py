"""Conversations whose turns vLLM takes in a process of Ray."""

import functools

import jax
import numpy as np

import local_ray
from rlinf_jax.engines import vllm
from rlinf_jax.state import state_readers
import saved
from stages import workflows
from stages.language import conversation, evaluate, policy_stages
from stages.learn import optimizers
from tests.rlinf_jax.runtime.ray import driver_test
import tiny
import toy_conversation
import vllm_models

pytestmark = vllm_models.marks

cluster, runtimes = local_ray.cluster, driver_test.runtimes

LENGTH, PROMPT, TURNS, GROUP = 48, 9, 4, 2
ENGINE = {
  'max_num_seqs': 16,
  'max_model_len': PROMPT + LENGTH,
  'block_size': 32,
}
# Every fourth token ends a turn, so that rows have several of them.
SIZES = vllm_models.SIZES | {
  'eos_token_id': [*range(3, 96, 4)],
  'tie_word_embeddings': True,
}
PLAN = {
  'places': {'actor': {'devices': [0]}, 'learner': {'devices': [1]}},
  'stages': {
    'keys': 'actor',
    'repeat': 'actor',
    'begin_conversation': 'actor',
    'generate': 'actor',
    'environment': 'actor',
    'append_reply': 'actor',
    'is_over': 'actor',
    'answer': 'actor',
    '*': 'learner',
  },
}


def grpo(case):
  converse = toy_conversation.converse(TURNS)
  return workflows.grpo(
    case.policy(functools.partial(vllm.engine, **ENGINE), LENGTH),
    conversation.episode_return(),
    optimizers.adamw(1e-3),
    group_size=GROUP,
    rollouts=functools.partial(policy_stages.complete, converse=converse),
    evaluator=functools.partial(evaluate.evaluate, converse=converse),
  )


def batch(seed):
  return tiny.problem(8, PROMPT, seed)


def flows(case):
  """Recorded by every process."""
  workflow = grpo(case)
  return (
    tiny.trace(workflow, batch(0)),
    tiny.trace_evaluation(workflow, batch(0)),
  )


def initial(case):
  return grpo(case).init(jax.random.key(0))


def test_conversations_by_vllm_are_those_of_one_process(runtimes, tmp_path):
  """Two steps: the second samples with parameters that were sent once more."""
  vllm_models.reference(SIZES, 0).save_pretrained(tmp_path)
  case = vllm_models.Case(SIZES, str(tmp_path))
  found = []
  for runtime in runtimes(PLAN, functools.partial(flows, case)):
    runtime.start(state_readers.FirstState(functools.partial(initial, case)))
    infos = [
      tiny.read(jax.device_get(runtime.step(batch(i), jax.random.key(i))))
      for i in range(2)
    ]
    found.append((infos, saved.state_of(runtime).actor.params))
    runtime.close()
  (infos, moved), (expected, want) = found
  for info, other in zip(infos, expected, strict=True):
    assert 0 < info['rollout/logprob_gap_max'] < 1e-3
    for name in ('reward_mean', 'reward/turns', 'response_length_mean'):
      assert info[f'rollout/{name}'] == other[f'rollout/{name}'], name
    assert info['rollout/reward/turns'] > 1
  # Threads of the two processes add in other orders.
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5),
    moved,
    want,
  )
