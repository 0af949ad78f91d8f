"""Completions end at texts, whichever tokens write them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import base
from stages.language import language_model
from stages.language.decoding import stop_texts
from tests.stages.language import resume_test
from tests.stages.language.decoding import slot_resume_test
from tests.stages.language.decoding.generate_test import (
  alike,
  B,
  CONFIG,
  GROUP,
  keys,
  params,
  prompts,
  T,
)

# Of three letters, so that texts are often met, and one of two bytes.
LETTERS = ['a', 'b', 'ab', 'ba', 'é', 'aab', 'bé', None, '', 'c']
BYTES = [
  None if x is None else x.encode() for x in (LETTERS * CONFIG.V)[: CONFIG.V]
]
TEXTS = [('abab',), ('aa', 'bab'), ('éa', 'ca', 'cc'), ('babab', 'aba', 'abé')]


def first_end(row, texts) -> int | None:
  """The place of the first token in which a text ends, by search."""
  read = b''
  for i, token in enumerate(row):
    own = BYTES[token]
    before, read = (read, read + own) if own else (b'', b'')
    for n in range(len(before) + 1, len(read) + 1):
      if read[:n].endswith(tuple(x.encode() for x in texts)):
        return i
  return None


@pytest.mark.parametrize('texts', TEXTS)
def test_a_text_is_found_in_any_tokens(texts):
  found = stop_texts.make(texts, BYTES)
  rng = np.random.default_rng(0)
  token_BT = rng.integers(0, CONFIG.V, (300, 12))
  state_B, ended_B = jnp.zeros(300, int), np.full(300, -1)
  for t in range(12):
    state_B = found.advance(state_B, token_BT[:, t])
    is_new_B = np.asarray(found.has_ended(state_B)) & (ended_B < 0)
    ended_B = np.where(is_new_B, t, ended_B)
  want = [first_end(row, texts) for row in token_BT]
  assert ended_B.tolist() == [-1 if x is None else x for x in want]
  assert 0 < (ended_B >= 0).sum() < 300
  # On the host, where an engine generates.
  for row, t in zip(token_BT, want, strict=True):
    count, _, is_end = found.read(0, row)
    assert (count, is_end) == ((12, False) if t is None else (t + 1, True))
  # After what earlier calls drew, the state is that of all their tokens.
  length_B = rng.integers(0, 13, 300)
  mask_BT = (np.arange(12) < length_B[:, None]).astype(np.float32)
  state_B = jnp.zeros(300, int)
  for t in range(12):
    next_B = found.advance(state_B, token_BT[:, t]) % found.next_CS.shape[1]
    state_B = jnp.where(mask_BT[:, t] > 0, next_B, state_B)
  begun = base.Completions(jnp.asarray(token_BT), mask_BT, mask_BT, None)
  np.testing.assert_array_equal(found.begin(begun), state_B)
  after = [
    found.after(row[:n]) for row, n in zip(token_BT, length_B, strict=True)
  ]
  np.testing.assert_array_equal(after, state_B)


@functools.cache
def policy(texts=(), slots=None):
  found = stop_texts.make(texts, BYTES) if texts else None
  return language_model.policy(
    CONFIG, response_length=T, stop=(2,), stop_texts=found, slots=slots
  )


def act(**settings):
  run = functools.partial(policy(**settings).act, group_size=GROUP)
  return jax.jit(run)(params(), prompts(), keys())


def test_a_completion_is_that_of_no_texts_up_to_the_first():
  texts = TEXTS[1]
  whole, got = act(), act(texts=texts)
  ended = 0
  for b, action in enumerate(np.asarray(whole.action)):
    length = int(whole.mask[b].sum())
    end = first_end(action[:length], texts)
    ended += end is not None
    kept = np.arange(T) < (length if end is None else end + 1)
    np.testing.assert_array_equal(got.mask[b], kept)
    np.testing.assert_array_equal(got.action[b], action * kept)
    np.testing.assert_allclose(got.logp[b], whole.logp[b] * kept, atol=1e-5)
    assert got.truncated[b] == (whole.truncated[b] if end is None else 0)
  assert 0 < ended
  in_slots = act(texts=texts, slots=4)
  alike(in_slots._replace(obs=None), got._replace(obs=None))


def test_interrupted_completions_end_at_the_same_tokens():
  """A text may have begun in the tokens that were drawn before."""
  texts = TEXTS[1]
  whole = act(texts=texts)
  length_B = np.random.default_rng(1).integers(0, T + 1, B)
  length_B = length_B * (np.arange(B) < slot_resume_test.STARTED)
  draft = resume_test.cut(whole, length_B)
  assert 0 < (whole.truncated == 0).sum()
  for slots, cached in ((None, False), (None, True), (3, False)):
    own = policy(texts=texts, slots=slots)
    kept = {'num_started': slot_resume_test.STARTED}
    if cached:
      kept = {'cache': own.empty_cache(B), 'max_unread': T}
    got = jax.jit(functools.partial(own.resume, group_size=GROUP, **kept))(
      params(), prompts(), keys(), draft
    )
    got = got[0] if cached else got
    np.testing.assert_array_equal(got.action, whole.action)
    np.testing.assert_array_equal(got.mask, whole.mask)
    np.testing.assert_array_equal(got.alive, whole.truncated > 0)
