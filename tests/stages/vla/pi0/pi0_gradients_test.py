"""Gradients of π0 and π0.5 in bfloat16, against float32's.

Weights are numbers of bfloat16, so that arithmetic alone differs. Chunks lie
above what the model predicts in most rows: in sums, errors of single tokens
cancel, and gradients do not.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bfloat16
import claims
from stages.models.control import flow_policy
from stages.models.vision import vit
from stages.vla import instructions
from stages.vla.pi0 import pi0, pi0_policy

# 16,384 patches and as many actions.
B, SIZE, PATCH, Z, A, WIDTH, STEPS = 256, 16, 2, 64, 4, 3, 2
STATE = 'state'
STATS = {
  name: {'mean': [0.0] * WIDTH, 'std': [1.0] * WIDTH}
  | {'q01': [-1.0] * WIDTH, 'q99': [1.0] * WIDTH}
  for name in (STATE, 'actions')
}
# Bin b is written as the token b mod 12, so that neighbors differ.
STATE_TOKENS = instructions.StateTokens(
  np.arange(257)[:, None] % 12, np.ones((257, 1), np.int32), np.array([13, 14])
)


def policy(adaptive, kind, dtype):
  gemma = functools.partial(
    pi0.GEMMA, V=16, L=2, H=2, K=1, W=8, F=32, dtype=dtype
  )
  tower = vit.Config(
    image_size=SIZE, patch_size=PATCH, D=16, L=1, H=2, F=16, dtype=dtype
  )
  config = pi0.Config(
    tower, gemma(D=24), gemma(D=32), Z=Z, A=A, O=4, adaptive=adaptive
  )
  return pi0_policy.policy(
    None,
    config,
    instruction=(2, 7, 5),
    state_tokens=STATE_TOKENS if adaptive else None,
    norm_stats=STATS,
    cameras=('image',),
    vectors=(STATE,),
    num_steps=STEPS,
    exploration=flow_policy.Exploration(kind),
    critic=False,
  )


def draw(rng, *shape):
  return jnp.asarray(rng.normal(size=shape), 'bfloat16').astype('float32')


def observation(rng):
  image = rng.integers(160, 256, (B, SIZE, SIZE, 3), np.uint8)
  return {'image': jnp.asarray(image), STATE: 1 + draw(rng, B, WIDTH)}


def demonstrations(rng):
  """Pictures and states, chunks, and keys."""
  chunk = 1 + draw(rng, B, Z, WIDTH) / 2
  return observation(rng), chunk, jax.random.split(jax.random.key(0), B)


def imitation(made, params, data):
  return made.imitation_loss(params, *data).mean()


def experience(kind, rng):
  """Pictures and states, and how Flow-Noise or Flow-SDE made chunks."""
  # Each step ends above where the velocity leads.
  rise = 2.0 * jnp.arange(STEPS + 1)[None, :, None]
  step = np.broadcast_to(np.arange(STEPS)[None], (B, STEPS))
  if kind == 'sde':
    step = rng.integers(0, STEPS, (B, 1))
  noise = draw(rng, B, 1, Z * A) + draw(rng, B, STEPS + 1, Z * A) / 4
  path = noise + rise
  return observation(rng), flow_policy.Denoising(path, jnp.asarray(step))


def reinforcement(made, params, data):
  return -made.evaluate(params, *data).logp.mean() / (Z * A)


noisy, experience_sde = (
  functools.partial(experience, kind) for kind in ('noise', 'sde')
)
# `pi0_bfloat16_test` is of these.
TOWER = 'vision', 'projector'
UNREAD = {'norm_gate_OD', 'norm_gate_bias_D'}
CASES = {
  'pi0_imitation': (False, 'sde', TOWER, imitation, demonstrations),
  'pi05_imitation': (True, 'sde', TOWER, imitation, demonstrations),
  'pi05_noise': (True, 'noise', (*TOWER, 'trunk'), reinforcement, noisy),
  'pi0_sde': (False, 'sde', TOWER, reinforcement, experience_sde),
}
# It has all layers that the others have, but for what reads the state.
OFTEN = ('pi05_imitation',)


@pytest.mark.parametrize('case', claims.some(CASES, OFTEN))
def test_gradients_of_all_leaves_are_near_those_of_float32(case):
  adaptive, kind, frozen, loss, make_data = CASES[case]
  wide, narrow = (
    policy(adaptive, kind, dtype) for dtype in ('float32', 'bfloat16')
  )
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(wide.init, jax.random.key(0))
  params = jax.tree.map(lambda x: draw(rng, *x.shape) / 5, shapes)
  seen = {part: params.pop(part) for part in frozen}
  data = make_data(rng)

  def gradient(made):
    of = lambda params, seen, data: loss(made, params | seen, data)
    return jax.device_get(jax.jit(jax.grad(of))(params, seen, data))

  want, got = gradient(wide), gradient(narrow)
  for tree in want, got:
    # Of the trunk, only keys and values are read. The last norm has a gate, as
    # in checkpoints, and nothing after it to add.
    assert 'trunk' not in tree or not np.any(tree['trunk'].pop('norm_D'))
    for name in UNREAD.intersection(tree['expert']):
      assert not np.any(tree['expert'].pop(name))
  bfloat16.check(want, got)
