"""Learned rewards among others: sums, metrics, tokens, places."""

import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import in_memory
import own_data
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.data import text_arrays
from rlinf_jax.rewards import functions, model, verifier
from rlinf_jax.runtime import local
from stages import base, workflows
from stages.language import (
  classifier,
  huggingface,
  tokens,
  value_model,
  verifiers,
)
from stages.models import transformer
from stages.models.files import weights_writer
import tiny

KEY = jax.random.key(0)
QUESTIONS = ['1+1=?', 'What is 2+2, please?']
COMPLETIONS = ['2', 'It is 4.']


def classifier_of(policy: str, folder: pathlib.Path) -> str:
  """A random reward model with the policy's sizes and tokenizer."""
  config = huggingface.load_config(policy)
  params = transformer.init_params(config, jax.random.key(3))
  value_D = jax.random.normal(KEY, (config.D,))
  huggingface.save(folder, params, config, model_type='qwen2')
  raw = json.loads((folder / 'config.json').read_text())
  raw['architectures'] = ['Qwen2ForSequenceClassification']
  raw['id2label'] = {'0': 'LABEL_0'}
  (folder / 'config.json').write_text(json.dumps(raw))
  names = classifier.names(folder)
  weights_writer.save(folder, params | {'value_D': value_D}, names)
  for path in pathlib.Path(policy).glob('*token*'):
    shutil.copy(path, folder / path.name)
  for path in pathlib.Path(policy).glob('*.jinja'):
    shutil.copy(path, folder / path.name)
  return str(folder)


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  """A policy, a reward model of its tokenizer, and one of another template."""
  folder = tmp_path_factory.mktemp('models')
  policy = own_data.model(folder)
  same = classifier_of(policy, folder / 'same')
  other = classifier_of(policy, folder / 'other')
  tokenizer = tokens.load_tokenizer(other)
  tokenizer.chat_template = own_data.TEMPLATE.replace(';', '|')
  tokenizer.save_pretrained(other)
  tokens.load_tokenizer.cache_clear()
  return policy, same, other


def experience(policy, T=10):
  """Completions of `QUESTIONS`, the first of which has no end token."""
  tokenizer = tokens.load_tokenizer(policy)
  texts = [
    tokenizer.apply_chat_template(
      [{'role': 'user', 'content': q}],
      tokenize=False,
      add_generation_prompt=True,
    )
    for q in QUESTIONS
  ]
  prompt = tokens.encode_prompts(tokenizer, texts, 40)
  action, mask = tokens.encode_completions(tokenizer, COMPLETIONS, T)
  mask[0, mask[0].sum().astype(int) - 1] = 0.0
  reference = text_arrays.Reference(
    text_arrays.pack(QUESTIONS), text_arrays.pack(['2', '4'])
  )
  return reference, base.Experience(
    prompt, action, -mask, mask, 1.0 - mask[:, 0]
  )


def length(completion) -> float:
  return float(completion.tokens)


def scores(checkpoint, rows):
  """The value after the last of each row of tokens."""
  critic = classifier.reward_model(checkpoint)
  prompt = tokens.pad_left(rows, max(map(len, rows)))
  values = critic.value(
    critic.init(KEY), prompt, jnp.zeros((len(rows), 1), jnp.int32)
  )
  return np.asarray(values)[:, 0]


@pytest.mark.parametrize('packed_tokens', [None, 64])
def test_a_reward_model_reads_the_tokens_of_a_policy_of_its_tokenizer(
  packed_tokens, folders, capsys
):
  policy, same, _ = folders
  verify = verifier.verify(
    policy,
    rewards=[
      length,
      model.reward_model(same, packed_tokens=packed_tokens),
      functions.finishes,
    ],
    weights=[1.0, 0.5, 2.0],
  )
  assert (
    'reward_model reads the tokens of the policy' in capsys.readouterr().out
  )
  reference, x = experience(policy)
  verdict = verify.verify(verify.init(KEY), reference, x)
  rows = [
    [*p[m > 0], *a[n > 0]]
    for p, m, a, n in zip(*x.obs, x.action, x.mask, strict=True)
  ]
  want = scores(same, rows)
  assert abs(want[0] - want[1]) > 1e-3
  np.testing.assert_allclose(verdict.terms['reward_model'], want, rtol=1e-4)
  tokens_of = x.mask.sum(1)
  np.testing.assert_allclose(
    verdict.reward, tokens_of + 0.5 * want + 2.0, rtol=1e-4
  )
  np.testing.assert_array_equal(
    verdict.correct, 1.0
  )  # The first is the length.
  np.testing.assert_array_equal(verdict.terms['failed'], 0.0)


@pytest.mark.parametrize('packed_tokens', [None, 64])
def test_texts_are_tokenized_again_for_another_tokenizer(
  packed_tokens, folders, capsys
):
  policy, _, other = folders
  judge = model.reward_model(
    other, name='judge', length=64, packed_tokens=packed_tokens
  )
  verify = verifier.verify(policy, rewards=[judge])
  assert 'judge has another tokenizer or chat' in capsys.readouterr().out
  reference, x = experience(policy)
  verdict = verify.verify(verify.init(KEY), reference, x)
  tokenizer = tokens.load_tokenizer(other)
  texts = [
    tokenizer.apply_chat_template(
      [{'role': 'user', 'content': q}, {'role': 'assistant', 'content': a}],
      tokenize=False,
    )
    for q, a in zip(QUESTIONS, COMPLETIONS, strict=True)
  ]
  assert 'It is 4.' in texts[1] and ';' not in texts[1]
  want = scores(other, tokenizer(texts)['input_ids'])
  np.testing.assert_allclose(verdict.terms['judge'], want, rtol=1e-4)
  np.testing.assert_allclose(verdict.reward, want, rtol=1e-4)
  np.testing.assert_array_equal(verdict.correct, want > 0.5)


def test_a_tokenizer_without_a_template_is_refused(folders, tmp_path):
  policy, _, other = folders
  bare = tmp_path / 'bare'
  shutil.copytree(other, bare)
  (bare / 'chat_template.jinja').unlink()
  with pytest.raises(ValueError, match='no chat template, so questions and'):
    verifier.verify(policy, rewards=[model.reward_model(str(bare))])


def test_a_workflow_without_room_for_parameters_refuses_reward_models(folders):
  policy, same, _ = folders
  workflow = workflows.reinforce(
    tiny.policy(),
    verifier.verify(policy, rewards=[model.reward_model(same)]),
    optax.sgd(1.0),
    group_size=2,
  )
  with pytest.raises(ValueError, match='calls its verifier without any'):
    tiny.trace(workflow, tiny.problem())


def test_a_learned_verifier_is_refused_before_anything_runs():
  own = value_model.own_trunk(tiny.CONFIG)
  verify = verifiers.add_scores(None, [verifiers.scorer('judge', own)])
  with pytest.raises(ValueError, match='calls its verifier without any'):
    workflows.sft(tiny.policy(), verify, optax.sgd(1.0))


def test_a_score_that_is_not_finite_counts_as_zero(folders):
  policy, same, _ = folders
  verify = verifier.verify(policy, rewards=[length, model.reward_model(same)])
  params = jax.tree.map(lambda x: x * np.nan, verify.init(KEY))
  reference, x = experience(policy)
  verdict = verify.verify(params, reference, x)
  np.testing.assert_array_equal(verdict.terms['failed'], 1.0)
  np.testing.assert_array_equal(verdict.reward, x.mask.sum(1))


@pytest.mark.slow
@pytest.mark.parametrize(
  'make', [workflows.grpo, functools.partial(workflows.dapo, max_rounds=2)]
)
def test_a_reward_model_with_a_place_of_its_own_changes_no_bit(make):
  own = value_model.own_trunk(tiny.CONFIG)
  verify = verifiers.add_scores(
    tiny.even, [verifiers.scorer('judge', own, 0.5)]
  )
  workflow = make(tiny.policy(), verify, optax.sgd(0.1), group_size=4)
  state, batch = workflow.init(KEY), tiny.problem()
  head = {'value_D': jnp.ones(tiny.CONFIG.D)}
  params = {'judge': state.verifier[base.FROZEN]['judge'] | head}
  state = state._replace(verifier={base.FROZEN: params})
  flow = flow_lib.trace(workflow.step, state, batch, KEY)
  plan = plan_lib.parse(
    {
      'places': {p: {'devices': [i]} for i, p in enumerate('ab')},
      'stages': {'judge': 'b', '*': 'a'},
    },
    flow.stages,
  )
  runtime = local.LocalRuntime(plan, step=flow)
  in_memory.start(runtime, state)
  got = runtime.step(batch, KEY)
  want_state, want = workflow.step(state, batch, KEY)
  tiny.assert_same_bits((got, in_memory.state(runtime)), (want, want_state))
  numbers = tiny.read(want)
  assert abs(numbers['rollout/reward/judge']) > 1e-3
  evaluated = tiny.read(workflow.evaluate(state, batch, KEY))
  assert 'eval/reward/judge' in evaluated
  runtime.close()
