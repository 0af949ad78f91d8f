"""In slots, interrupted completions go on as they do in a static batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import claims
from sharding import mesh as mesh_lib
from stages import base
from stages.language import language_model
from stages.language.decoding import stopping, unfinished
from stages.language.partial_rollout import carried as carried_lib
from stages.models import transformer
from tests.stages.language import resume_test
from tests.stages.language.decoding.continuous_test import GEMMA
from tests.stages.language.decoding.generate_test import (
  act,
  B,
  CONFIG,
  CUT,
  GROUP,
  keys,
  params,
  prompts,
  STOP,
  T,
)

# Of groups of three, groups that a step may leave, and groups that it may not.
RULES = [(0, ()), (1, ()), (2, ()), (2, (1,)), (2, (0,)), (1, (2,))]
STARTED = 2 * GROUP


def resume(slots, group_size=GROUP, config=CONFIG, axes=(), **settings):
  """Continues rows until a rule says to stop, compiled for any rule."""
  kept = {'response_length': T, 'stop': STOP} | settings
  policy = language_model.policy(config, slots=slots, **kept)

  def run(params, prompt, key_B, draft, age_B, extra_groups):
    return policy.resume(
      params,
      prompt,
      key_B,
      draft,
      group_size=group_size,
      num_started=STARTED,
      should_continue=carried_lib.should_continue(
        age_B, group_size, 1, extra_groups
      ),
    )

  def on_mesh(*args):
    devices = jax.devices()[: int(np.prod([n for _, n in axes]))]
    with jax.set_mesh(mesh_lib.mesh(devices, dict(axes))):
      return run(*args)

  run = jax.jit(run)
  return on_mesh if axes else run


static = functools.cache(resume)


def ages(due, group_size=GROUP):
  return jnp.repeat(
    jnp.isin(jnp.arange(B // group_size), jnp.array(due, int)), group_size
  ).astype(jnp.int32)


def cases(n, prompt=None, group_size=GROUP):
  """Arguments of some calls: other tokens so far, keys and rules."""
  prompt = prompts() if prompt is None else prompt
  whole = act(group_size=GROUP)(params(), prompts(), keys())
  for i in range(n):
    rng = np.random.default_rng(i)
    length_B = rng.integers(0, T + 1, B) * (np.arange(B) < STARTED)
    extra, due = RULES[i % len(RULES)]
    # Some carried rows have ended, by a token or as they are full.
    draft = resume_test.cut(whole, length_B)
    yield (
      params(),
      prompt,
      keys(i),
      draft,
      ages(due, group_size),
      jnp.int32(extra),
    )


def same(got: base.Completions, want: base.Completions, atol: float = 1e-5):
  for name in 'action', 'mask', 'alive':
    np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
  np.testing.assert_allclose(got.logp, want.logp, rtol=0, atol=atol)


@pytest.mark.parametrize('slots', claims.some([1, 2, 4, 7, B], keep=[2, B]))
def test_rows_stop_where_those_of_a_static_batch_stop(slots):
  run, cut, left = resume(slots), 0, 0
  for args in cases(12):
    want = static(None)(*args)
    same(run(*args), want)
    open_B = want.alive & (want.mask.sum(1) < T)
    left += open_B.sum()
    cut += (open_B & (want.mask.sum(1) > args[3].mask.sum(1))).sum()
  assert 5 < cut < left  # Some have no new token, as all that is due has ended.


MESHES = {
  'three devices': ((('data', 3),), GROUP),
  'rows of a group apart': ((('data', 3),), 1),
  'heads divided': ((('data', 3), ('tensor', 2)), GROUP),
}


@pytest.mark.parametrize('name', claims.some(MESHES, ['heads divided']))
def test_devices_stop_together(name, in_float64):
  """Three devices with two slots; continued rows are on all of them."""
  axes, group_size = MESHES[name]
  # Two devices can divide 32 tokens. They add in another order, which in
  # float32 is worth 1.4e-5 nats on some processors.
  config = dataclasses.replace(CONFIG, V=32, dtype='float64')
  weights = transformer.init_params(config, jax.random.key(0))
  run = resume(2, group_size, config, axes=axes)
  want = resume(None, group_size, config)
  for _, *args in cases(6, group_size=group_size):
    same(run(weights, *args), want(weights, *args), atol=1e-12)


def test_rows_are_dealt_to_devices_in_turns():
  order = stopping.Order(('data',), 2, 2)
  dealt = order.dealt(jnp.arange(8))
  assert dealt.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
  assert order.restored(dealt).tolist() == [*range(8)]
  # Of five leading rows in parts of two, a device has at most two parts.
  assert [order.on_each(n) for n in (0, 2, 4, 5)] == [0, 2, 2, 4]


def test_rows_may_arrive_in_any_order():
  run = resume(3, group_size=1)
  for args in cases(3, group_size=1):
    order = np.random.default_rng(0).permutation(STARTED)
    order = np.concatenate([order, STARTED + order[order < B - STARTED]])
    weights, prompt, key_B, draft, age_B, extra = args
    rows = prompt, key_B, draft, age_B
    shuffled = jax.tree.map(lambda x, order=order: x[order], rows)
    got = run(weights, *shuffled, extra)
    want = static(None, 1)(*args)
    same(got, jax.tree.map(lambda x, order=order: x[order], want))


ALL = 'windows, right padding, top-k and top-p'
OTHERS = {
  ALL: ({'sampling': CUT}, GEMMA),
  'right padding, top-k and top-p': ({'sampling': CUT}, {}),
  'windows': ({}, GEMMA),
}


@pytest.mark.parametrize('name', claims.some(OTHERS, [ALL]))
def test_other_settings_stop_alike(name):
  settings, model = OTHERS[name]
  config = dataclasses.replace(CONFIG, **model)
  weights = transformer.init_params(config, jax.random.key(0))
  run, want = (resume(n, config=config, **settings) for n in (2, None))
  for _, *args in cases(3, prompts('right', junk=4)):
    same(run(weights, *args), want(weights, *args))


def test_only_rows_that_go_on_are_read_again(monkeypatch):
  """One at a time here, for prompts and completions of 15 tokens."""
  encode, read = unfinished._encoded, []

  def spy(*args):
    jax.debug.callback(lambda: read.append(1))
    return encode(*args)

  monkeypatch.setattr(unfinished, '_encoded', spy)
  monkeypatch.setattr(unfinished, 'MAX_TOKENS', 15)
  run = resume(3)
  for args in cases(4):
    same(run(*args), static(None)(*args))
    jax.effects_barrier()
    draft = args[3]
    open_B = draft.alive & (draft.mask.sum(1) < T)
    assert len(read) == open_B[:STARTED].sum()
    read.clear()


def test_ended_rows_and_a_call_that_stops_at_once_change_nothing():
  whole = act()(params(), prompts(), keys())
  ended = resume_test.completions_of(whole)
  none = resume_test.cut(whole, np.zeros(B))
  run = resume(2)
  rest = ages(()), jnp.int32(0)
  same(run(params(), prompts(), keys(1), ended, *rest), ended)
  rest = ages(()), jnp.int32(B // GROUP)
  same(run(params(), prompts(), keys(1), none, *rest), none)
