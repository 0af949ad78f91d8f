"""Keys and values of carried rows, which later calls need not read again."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import claims
from sharding import mesh as mesh_lib
from stages import base
from stages.language import language_model, partial_rollout
from stages.language.decoding import stopping, unfinished
from stages.language.decoding.slots import kept_rows, slot_cache, slot_rows
from tests.stages.language import partial_rollout_test
from tests.stages.language.decoding import generate_test
from tests.stages.language.decoding.continuous_test import GEMMA
import tiny

# Rounds of six groups of two rows, which leave three groups to the next round.
GROUP, GROUPS, EXTRA, T = 2, 6, 3, 12
ROUNDS = 4


@functools.cache
def rollouts(slots, **model):
  config = dataclasses.replace(tiny.CONFIG, **model)
  policy = language_model.policy(
    config, response_length=T, stop=partial_rollout_test.STOP, slots=slots
  )
  found = partial_rollout.partial_rollouts(
    policy, GROUP, max_carry=2, extra_groups=EXTRA
  )
  return policy, found


def rounds(keeps, slots=7, axes=(), padding='left', **model):
  """Yields what rounds return and carry; they have the same parameters."""
  policy, method = rollouts(slots, **model)
  actor = base.Version(policy.init(jax.random.key(5)), jnp.int32(0))
  carry = method.allocate(tiny.problem(GROUPS))
  carry = method.keep(carry) if keeps else carry
  devices = jax.devices()[: int(np.prod([n for _, n in axes], initial=1))]
  mesh = mesh_lib.mesh(devices, dict(axes)) if axes else None
  for i in range(ROUNDS):
    problem = partial_rollout_test.problem_of(i)
    if padding == 'right':
      turned = jax.tree.map(lambda x: x[:, ::-1], problem.prompt)
      problem = problem._replace(prompt=turned)
    args = actor, carry, problem, partial_rollout_test.keys(i)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
      problem, x, carry, _ = method.run(*args)
    yield problem, x, carry


def open_rows(carry):
  return carry.rows.alive & (carry.rows.mask.sum(1) < T)


def same(got, want, **tolerance):
  for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
    if jnp.issubdtype(one.dtype, jnp.floating):
      np.testing.assert_allclose(one, other, rtol=0, **tolerance)
    else:
      np.testing.assert_array_equal(one, other)


CASES = {
  'seven slots': {},
  'as many slots as rows': {'slots': 18},
  'right padding': {'padding': 'right'},
  'windows': GEMMA,
  'windows and right padding': GEMMA | {'padding': 'right'},
}
ALL_CASES = CASES | {'one slot': {'slots': 1}, 'two slots': {'slots': 2}}


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', claims.some(ALL_CASES, ['windows and right padding'])
)
def test_kept_rows_go_on_as_rows_do_that_are_read_again(name, in_float64):
  settings = ALL_CASES[name] | {'dtype': 'float64'}
  continued = 0
  for want, (problem, x, carry) in zip(
    rounds(False, **settings), rounds(True, **settings), strict=True
  ):
    got = problem, x, carry._replace(kept=())
    same(got, want, atol=1e-12)
    assert carry.kept.is_kept[open_rows(carry)].all()
    continued += int(open_rows(carry).sum())
  assert continued > ROUNDS


def test_what_is_kept_is_not_read_again(monkeypatch):
  """In float32, log-probabilities differ by its rounding."""
  want = [(problem, x) for problem, x, _ in rounds(False)]
  encode, read = unfinished._encoded, []

  def spy(*args):
    jax.debug.callback(lambda: read.append(1))
    return encode(*args)

  monkeypatch.setattr(unfinished, '_encoded', spy)
  got = [(problem, x) for problem, x, _ in rounds(True)]
  jax.effects_barrier()
  assert not read
  same(got, want, atol=1e-5)


MESHES = {
  'three devices': (('data', 3),),
  'groups and heads divided': (('data', 2), ('tensor', 2)),
  'rows that four devices cannot share': (('data', 4),),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', claims.some(MESHES, ['three devices']))
def test_devices_keep_rows_for_themselves(name, in_float64):
  settings = {'dtype': 'float64', 'slots': 2, 'V': 32, 'K': 2}
  kept = 0
  for want, (problem, x, carry) in zip(
    rounds(False, **settings),
    rounds(True, axes=MESHES[name], **settings),
    strict=True,
  ):
    same((problem, x, carry._replace(kept=())), want, atol=1e-12)
    kept += int(carry.kept.is_kept[open_rows(carry)].sum())
  assert kept > ROUNDS


def test_carried_rows_go_to_the_devices_that_have_kept_them():
  """Seven parts of two rows on three devices, which keep five rows each."""
  order = stopping.Order(('data',), 3, 2)
  # Parts 0 and 4 were on the last device, 2, 3 and 5 on the first.
  at_NG = [[-1, 12], [-1, -1], [0, 4], [1, -1], [10, 11], [-1, 2], [-1, -1]]
  kept = kept_rows.KeptRows({}, jnp.array(at_NG).ravel())
  sent = kept_rows.sent_home(order, kept)
  parts = (sent.first[::2] // 2).tolist()
  assert sorted(parts) == [*range(7)]
  assert (parts[0], parts[3], parts[6], parts[2], parts[5]) == (2, 3, 5, 0, 4)
  rows = jnp.arange(20)
  np.testing.assert_array_equal(sent.restored(sent.dealt(rows[:18])), rows[:18])
  at = kept_rows.dealt(kept, sent).at.reshape(3, -1)
  # By device: three parts at most, with the numbers of their rows there.
  assert at.tolist() == [
    [0, 4, 1, -1, -1, 2],
    [-1, -1, -1, -1, -1, -1],
    [-1, 2, 0, 1, -1, -1],
  ]
  # Of more parts than its share, a device gets the first, and none is lost.
  kept = kept_rows.KeptRows({}, jnp.zeros(14, jnp.int32))
  parts = kept_rows.sent_home(order, kept).first[::2] // 2
  assert (parts[0], parts[3], parts[6]) == (0, 1, 2)
  assert sorted(parts.tolist()) == [*range(7)]


def filled(lengths, ended, open_=()):
  """Slots whose rows have these numbers of tokens; row b is in slot b."""
  M, K, C, W = len(lengths), 2, 8, 2
  row_M = jnp.arange(1.0, M + 1)[:, None, None, None]
  column_1C = jnp.arange(C)[None, None, :, None] / 16
  cache = row_M + column_1C * jnp.ones((M, K, C, W))
  zero_M = jnp.zeros(M, jnp.int32)
  return slot_rows.Slots(
    row_M=jnp.arange(M),
    is_open_M=jnp.isin(jnp.arange(M), jnp.array(open_, int)),
    ended_M=jnp.array(ended, bool),
    length_M=jnp.array(lengths),
    prompt_M=zero_M + 3,
    position_M=zero_M,
    token_M=zero_M,
    caches=(slot_rows.kv_cache.LayerCache(cache, -cache),),
    action_MT=jnp.zeros((M, 5), jnp.int32),
    logp_MT=jnp.zeros((M, 5)),
  )


def test_rows_with_the_most_new_tokens_are_kept():
  config = dataclasses.replace(tiny.CONFIG, L=1, K=2, W=2, dtype='float32')
  before_B = jnp.array([0, 3, 0, 0, 1, 0])
  room = kept_rows.buffer(kept_rows.empty(config, 2, 5), before_B)
  # Row 1 has one new token; rows 3 and 5 have not ended, and 5 goes on.
  slots = filled([2, 4, 3, 1, 3, 2], [1, 1, 1, 0, 1, 0], open_=[5])
  room, after = jax.jit(kept_rows.leave)(room, slots)
  assert sorted(room.row_R.tolist()) == [2, 3]
  tiny.assert_same_bits(after, slots)
  ((key_RKTW, value_RKTW),) = room.layers['cache_BKTW']
  for r, row in enumerate(room.row_R.tolist()):
    want_T = row + 1 + (3 + np.arange(5)) / 16  # After three of the prompt.
    np.testing.assert_array_equal(key_RKTW[r, 1, :, 0], want_T)
    np.testing.assert_array_equal(value_RKTW[r, 0, :, 1], -want_T)
  # A row that is full has ended, too, with fewer new tokens than others.
  full = filled([0, 5, 0, 0, 0, 0], [0] * 6, open_=[0, 2, 3, 4, 5])
  assert jax.jit(kept_rows.leave)(room, full)[0].row_R.tolist() == (
    room.row_R.tolist()
  )
  layers, id_R = kept_rows.found(room, jnp.array([9, 8, 7, 6, 5, 4]))
  taken = kept_rows.take(layers, id_R, jnp.array([4, 6]))
  assert taken.is_kept.tolist() == [False, True]
  key_RKTW = taken.layers['cache_BKTW'][0].key
  assert key_RKTW[taken.at[1], 0, 0, 0] == 4 + 3 / 16


def test_no_iteration_copies_what_is_kept():
  config = dataclasses.replace(generate_test.CONFIG, dtype='float32')
  length, slots, rows = 500, 4, 6
  policy = language_model.policy(
    config, response_length=length, stop=(2,), slots=slots
  )

  def run(params, prompt, key_B, kept):
    empty = jnp.zeros((len(key_B), length))
    draft = base.Completions(
      empty.astype(int), empty, empty, jnp.ones(len(key_B), bool)
    )
    return policy.resume(
      params,
      prompt,
      key_B,
      draft,
      num_started=rows,
      should_continue=lambda open_B: open_B.sum() > rows,
      kept=kept,
    )[0]

  args = generate_test.params(), generate_test.prompts(), generate_test.keys()
  compiled = jax.jit(run).lower(*args, policy.empty_kept(rows)).compile()
  text = compiled.as_text()
  columns = slot_cache.columns(args[1].token.shape[1] + length)
  bodies = {*re.findall(r'body=(%[\w.-]+)', text)}
  for shape in (rows, config.K, columns, config.W), (rows, config.K, length, 4):
    shape = f'= f32[{",".join(map(str, shape))}]'
    updates = 0
    for computation in text.split('\n\n'):
      if computation.strip().split(' ')[0] in bodies:
        made = [x for x in computation.splitlines() if shape in x]
        assert not [x for x in made if ' copy(' in x]
        updates += len(made)
    assert updates
