"""Decoding that reads layers in place computes what it computes of copies."""

import functools

import jax
from jax.extend import core
import numpy as np
import pytest

from stages.models import transformer
import tiny

KEY = jax.random.key(0)


def decode(policy, params, group_size=4):
  """Completions of eight rows, and how often the stacked layers are sliced."""
  prompt = tiny.problem().prompt
  act = functools.partial(policy.act, group_size=group_size)
  keys = jax.random.split(KEY, 8)
  x = jax.jit(act)(params, prompt, keys)
  return x, loop_slices(jax.make_jaxpr(act)(params, prompt, keys).jaxpr)


def loop_slices(jaxpr, inside=False) -> int:
  """Counts slices of a feed-forward's stacked matrix in loops over tokens."""
  c, found = tiny.CONFIG, 0
  for eqn in jaxpr.eqns:
    shapes = [getattr(v.aval, 'shape', ()) for v in eqn.invars]
    is_slice = eqn.primitive.name in ('slice', 'squeeze', 'dynamic_slice')
    found += inside and is_slice and (c.L, c.D, c.F) in shapes
    for inner in core.jaxprs_in_params(eqn.params):
      in_loop = inside or eqn.primitive.name == 'while'
      found += loop_slices(inner, in_loop)
  return found


@pytest.mark.parametrize('slots', [None, 4])
def test_layers_that_are_read_in_place_change_no_bit(monkeypatch, slots):
  policy = tiny.policy('bfloat16', slots=slots)
  params = policy.init(KEY)
  rounded = policy.round_params(params)
  want, copied = decode(policy, rounded)
  monkeypatch.setattr(transformer, 'IN_PLACE', 'cpu')
  got, sliced = decode(policy, rounded)
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert not copied and sliced
  # Of what decoding rounds itself, it makes copies.
  assert not decode(policy, params)[1]
