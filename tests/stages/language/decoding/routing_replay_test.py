"""Routing replay: what is recorded, and what training makes of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import claims
from stages import workflows
from stages.language import (
  conversation,
  huggingface,
  policy_stages,
  value_model,
)
from stages.language.partial_rollout import carried as carried_lib
from stages.learn import advantages
from stages.models import lora, transformer
from stages.models.layers import mixture
from tests.rlinf_jax.runtime.plans import invariance_test
import tiny

GROUP = 4


@functools.cache
def replaying(dtype='float32', config=tiny.EXPERTS, **kwargs):
  return tiny.policy(dtype, config=config, replay_routing=True, **kwargs)


@functools.cache
def params(dtype='float32'):
  return replaying(dtype).init(jax.random.key(0))


def prompts(groups=4):
  return jax.tree.map(
    lambda x: np.repeat(x, GROUP, 0), tiny.problem(groups).prompt
  )


@functools.cache
def sampled(dtype='float32', config=tiny.EXPERTS, **kwargs):
  """Completions with their routing, and the parameters that sampled them."""
  policy, prompt = replaying(dtype, config, **kwargs), prompts()
  own = policy.init(jax.random.key(0))
  keys = jax.random.split(jax.random.key(1), len(prompt.token))
  act = jax.jit(functools.partial(policy.act, group_size=GROUP, record=True))
  return act(own, prompt, keys), own


def scored(policy, params, x, routing):
  return policy_stages.score(
    policy, params, x.obs, x.action, x.mask, GROUP, routing=routing
  ).logp


def read_positions(x):
  """Masks of the tokens read: of prompts but the last one, of completions."""
  order = np.cumsum(x.obs.mask, 1)
  of_prompt = (x.obs.mask > 0) & (order < order[:, -1:])
  return of_prompt, np.asarray(x.mask) > 0


def test_the_recorded_experts_are_those_of_a_plain_forward_pass():
  x, own = sampled()
  model = transformer.Transformer(tiny.EXPERTS)
  _, left = jax.jit(
    lambda token, mask: model.apply(
      {'params': own}, token, mask, mutable=[mixture.ROUTING]
    )
  )(
    np.concatenate([x.obs.token, x.action], 1),
    np.concatenate([x.obs.mask, x.mask.astype(np.int32)], 1),
  )
  want = left[mixture.ROUTING]['layers'][mixture.ROUTING].expert
  want = np.moveaxis(np.asarray(want), 0, 2)
  of_prompt, of_completion = read_positions(x)
  P = x.obs.token.shape[1]
  np.testing.assert_array_equal(
    x.routing.prompt[of_prompt], want[:, :P][of_prompt]
  )
  # The token before an action: the last of the prompt, or the action before.
  last = want[np.arange(len(want)), x.obs.mask.shape[1] - 1][:, None]
  want = np.concatenate([last, want[:, P:-1]], 1)
  np.testing.assert_array_equal(
    x.routing.completion[of_completion], want[of_completion]
  )
  assert x.routing.completion.dtype == jnp.uint8


@pytest.mark.parametrize('slots', [2, 16])
def test_slots_record_the_experts_of_a_static_batch(slots, monkeypatch):
  # Prompts are read in several chunks.
  monkeypatch.setattr('stages.language.decoding.prefill.MAX_PROMPT_TOKENS', 16)
  (want, _), (got, _) = sampled(), sampled(slots=slots)
  np.testing.assert_array_equal(got.action, want.action)
  of_prompt, of_completion = read_positions(want)
  np.testing.assert_array_equal(
    got.routing.prompt[of_prompt], want.routing.prompt[of_prompt]
  )
  np.testing.assert_array_equal(
    got.routing.completion[of_completion],
    want.routing.completion[of_completion],
  )


@pytest.mark.parametrize('packed_tokens', [None, 15])
def test_replay_of_unchanged_routers_changes_nothing(packed_tokens):
  x, own = sampled()
  policy = replaying(packed_tokens=packed_tokens)

  @functools.partial(jax.jit, static_argnums=1)
  @functools.partial(jax.value_and_grad, has_aux=True)
  def run(params, replays):
    logp = scored(policy, params, x, x.routing if replays else None)
    logp = jnp.where(x.mask > 0, logp, 0.0)
    return (logp * jnp.cos(jnp.arange(logp.size)).reshape(logp.shape)).sum(), (
      logp
    )

  (_, want), slopes = run(own, False)
  (_, got), replayed = run(own, True)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
  np.testing.assert_allclose(got, x.logp * x.mask, rtol=0, atol=2e-5)
  assert invariance_test.apart(replayed, slopes) <= 1e-6


@pytest.mark.parametrize('packed_tokens', [None, 15])
def test_other_routers_use_the_recorded_experts(packed_tokens):
  x, own = sampled()
  router = own['layers']['router_DE']
  # Now they choose other experts, and the weights of the old ones differ.
  moved = router + 0.3 * jax.random.normal(jax.random.key(5), router.shape)
  new = own | {'layers': own['layers'] | {'router_DE': moved}}
  policy = replaying(packed_tokens=packed_tokens)
  run = jax.jit(functools.partial(scored, policy, new))
  free, held = run(x, None), run(x, x.routing)
  assert np.abs((free - held) * x.mask).max() > 1e-3
  # With one expert a token, its weight is one for all logits of the router.
  single = dataclasses.replace(tiny.EXPERTS, experts_per_token=1)
  x, own = sampled(config=single)
  new = own | {'layers': own['layers'] | {'router_DE': moved}}
  policy = replaying(config=single, packed_tokens=packed_tokens)
  run = jax.jit(lambda params, routing: scored(policy, params, x, routing))
  assert np.abs((run(new, None) - x.logp) * x.mask).max() > 1e-3
  np.testing.assert_allclose(
    run(new, x.routing) * x.mask, x.logp * x.mask, rtol=0, atol=2e-5
  )


def test_replay_narrows_the_gap_of_bfloat16():
  config = dataclasses.replace(tiny.EXPERTS, E=8, L=4, init_stddev=0.5)
  x, own = sampled('bfloat16', config)
  policy = replaying('bfloat16', config)
  run = jax.jit(lambda routing: scored(policy, own, x, routing))

  def gap(routing):
    return (np.abs(run(routing) - x.logp) * x.mask).sum() / x.mask.sum()

  assert gap(x.routing) < 0.7 * gap(None)


@functools.cache
def grpo(packed_tokens=None):
  return workflows.grpo(
    replaying('float64', packed_tokens=packed_tokens),
    invariance_test.even,
    invariance_test.KEEP,
    group_size=GROUP,
    staleness=1,
  )


@functools.cache
def eager():
  """A state whose acting policy is older, a batch, and the result of a step."""
  state = grpo().init(jax.random.key(0))
  moved = invariance_test.begin(grpo()).actor
  state = state._replace(actor=moved)
  batch, key = tiny.problem(8, 6), jax.random.key(3)
  return state, batch, key, grpo().step(state, batch, key)


@pytest.mark.slow
@pytest.mark.usefixtures('in_float64')
@pytest.mark.parametrize(
  'place, pieces',
  claims.some(
    [('one', 4), ('data', 1), ('fsdp', 1), ('mixed', 1), ('mixed', 2)],
    [('one', 4)],
  ),
)
def test_no_plan_changes_a_replay(place, pieces):
  state, batch, key, want = eager()
  rows = dict.fromkeys(('generate', 'gradient'), 32 // pieces)
  got = invariance_test.planned(grpo(), state, batch, key, place, rows)
  invariance_test.same(got, want, 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures('in_float64')
def test_packed_rows_replay_the_same():
  state, batch, key, (want, _) = eager()
  got, _ = grpo(15).step(state, batch, key)
  slopes = map(invariance_test.gradient, (got, want))
  assert invariance_test.apart(*slopes) <= 1e-10


ADAM = optax.adam(1e-3)
MAKERS = {
  'dapo': lambda policy: workflows.dapo(
    policy, tiny.even, ADAM, group_size=GROUP, max_rounds=2
  ),
  'expert_iteration': lambda policy: workflows.expert_iteration(
    policy, tiny.even, ADAM, group_size=GROUP
  ),
  'distillation': lambda policy: workflows.distillation(
    policy, tiny.policy(), tiny.even, ADAM, group_size=GROUP
  ),
  'grpo of adapters': lambda policy: workflows.grpo(
    lora.wrap(policy, lora.Lora(rank=2, targets='qv')),
    tiny.even,
    ADAM,
    group_size=GROUP,
  ),
  'ppo': lambda policy: workflows.ppo(
    policy, tiny.even, value_model.own_trunk(tiny.CONFIG), ADAM, ADAM
  ),
  'grpo': lambda policy: workflows.grpo(
    policy,
    tiny.even,
    ADAM,
    group_size=GROUP,
    kl_coef=0.1,
    advantage=advantages.no_baseline,
    greedy_baseline=True,
  ),
}


@pytest.mark.parametrize('name', MAKERS)
def test_every_workflow_that_samples_trains_on_what_it_recorded(name):
  policy, readers = replaying('bfloat16'), []

  def evaluate(*args, routing=None, **kwargs):
    if routing is not None:
      readers.append(routing)
    return policy.evaluate(*args, routing=routing, **kwargs)

  workflow = MAKERS[name](policy._replace(evaluate=evaluate))
  state = jax.eval_shape(workflow.init, jax.random.key(0))
  problem = tiny.problem(8)
  tiny.trace(workflow, problem)
  # Log-probabilities around which the ratio is clipped, and the gradient.
  # Expert iteration has no ratio.
  assert len(readers) == 2 - (name == 'expert_iteration')
  readers.clear()
  jax.eval_shape(workflow.evaluate, state, problem, jax.random.key(0))
  assert not readers


def test_what_cannot_be_replayed_is_refused():
  with pytest.raises(ValueError, match='no experts to replay: set it'):
    tiny.policy(replay_routing=True)
  policy = replaying()
  with pytest.raises(ValueError, match='or replay_routing to False'):
    workflows.ppo(policy, tiny.even, value_model.head(tiny.EXPERTS), ADAM, ADAM)
  with pytest.raises(ValueError, match='or replays routing has none: set'):
    carried_lib.check(policy, 1, 1)
  with pytest.raises(ValueError, match='and replay_routing, and use a lang'):
    conversation.converse(policy, 'x', envs=None, max_turns=2)
  with pytest.raises(ValueError, match='which experts it has used'):
    huggingface.policy(
      'none', response_length=4, replay_routing=True, engine=object()
    )
