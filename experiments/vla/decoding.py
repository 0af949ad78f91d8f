"""Times a chunk of 8 × 7 numbers from the same trunk, decoded in two ways.

  python -m experiments.vla.decoding

OpenVLA writes its tokens one after the other, with keys and values kept;
OpenVLA-OFT writes all in one pass. Prints the median seconds of both, without
compilation, and their ratio; with `--counted`, their arithmetic and their
traffic with memory in place of seconds, without running either. With
`--published`, of the sizes of openvla-7b in bfloat16, for an accelerator.
"""

from collections.abc import Iterator
import functools
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from planner.counting import count
from stages import base
from stages.models import transformer
from stages.models.vision import vit
from stages.vla import pictures
from stages.vla.openvla import (
  action_tokens,
  openvla,
  openvla_oft,
  openvla_oft_policy,
  openvla_policy,
)

Z, A, PROMPT, REPEATS = 8, 7, 20, 9
TOWER = {'patch_size': 14, 'D': 128, 'L': 3, 'H': 2}


def config(size: int, width: int, layers: int) -> openvla.Config:
  """A model with small towers; 224 pixels are the published 256 patches."""
  tower = TOWER | {'image_size': size}
  return openvla.Config(
    vit.Config(F=512, has_class=True, registers=4, layer_scale=True, **tower),
    vit.Config(F=512, activation='gelu', **tower),
    transformer.Config(
      V=1088,
      D=width,
      L=layers,
      H=width // 64,
      K=width // 64,
      W=64,
      F=11 * width // 4,
      qkv_bias=False,
      tie_embeddings=False,
    ),
    pictures=pictures.Pictures(sizes=(size, size)),
  )


def stats(width: int) -> action_tokens.ActionStats:
  """Actions of −1 … 1."""
  one = np.ones(width, np.float32)
  return action_tokens.ActionStats(-one, one, one > 0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def normal(shape: tuple[int, ...], dtype: str, key: jax.Array) -> jax.Array:
  """Random numbers of a small deviation."""
  # Rounded in the kernel that draws them; random bfloat16 takes more memory.
  return (0.02 * jax.random.normal(key, shape)).astype(dtype)


def random_params(policy: base.Policy, dtype: str) -> base.Params:
  """Random parameters, all in one type: speed does not depend on them.

  They are drawn one by one, as all at once would take the memory of more.
  """
  key = jax.random.key(0)
  leaves, tree = jax.tree.flatten(jax.eval_shape(policy.init, key))
  keys = jax.random.split(key, len(leaves))
  params = [
    normal(x.shape, dtype, k) for x, k in zip(leaves, keys, strict=True)
  ]
  return jax.tree.unflatten(tree, params)


def seconds(policy: base.Policy, obs, rows: int, dtype: str) -> float:
  """The median of several calls of `act`."""
  params = random_params(policy, dtype)
  act = jax.jit(policy.act)
  spent = []
  for i in range(REPEATS + 1):
    keys = jax.random.split(jax.random.key(i), rows)
    start = time.perf_counter()
    jax.block_until_ready(act(params, obs, keys).action)
    spent.append(time.perf_counter() - start)
  return statistics.median(spent[1:])  # The first one compiles.


def counted(
  policy: base.Policy, obs, rows: int, dtype: str
) -> tuple[float, float]:
  """Operations and bytes of a call of `act`, 10⁹ of each.

  The bytes are those of products and loops, where elementwise arithmetic is
  fused: each token that is decoded alone reads the weights again.
  """
  params = jax.eval_shape(functools.partial(random_params, policy, dtype))
  keys = jax.random.split(jax.random.key(0), rows)
  work = count.work(policy.act, params, obs, keys)
  return work.flops / 1e9, work.bytes_moved / 1e9


def models(published: bool) -> Iterator[tuple[str, openvla.Config]]:
  """Yields models and what to call them."""
  if published:
    yield 'openvla-7b', openvla.published(dtype='bfloat16')
    return
  for size, width, layers in (56, 256, 4), (56, 512, 8), (224, 512, 8):
    name = f'{size} pixels, width {width}, {layers} layers'
    yield name, config(size, width, layers)


def main(measure, published: bool):
  """Prints a line for each size.

  Args:
    measure: `seconds` or `counted`.
    published: whether of the published size, and not of small ones.
  """
  for name, model in models(published):
    oft, size = openvla_oft.Config(model, Z=Z, A=A), model.dino.image_size
    for rows in 1, 8:
      token = jnp.full((rows, PROMPT), 7)
      prompt = base.Prompt(token, jnp.ones_like(token))
      image = jnp.zeros((rows, size, size, 3), jnp.uint8)
      slow = measure(
        openvla_policy.policy(model, stats(Z * A), critic=False),
        openvla_policy.Observation(image, prompt),
        rows,
        model.llama.dtype,
      )
      fast = measure(
        openvla_oft_policy.policy(oft, stats(A), critic=False),
        openvla_oft.Observation((image,), prompt),
        rows,
        model.llama.dtype,
      )
      found = compared({'one by one': slow, 'in one pass': fast})
      print(f'{name}, {rows} rows: {found}', flush=True)


def compared(ways: dict[str, float | tuple[float, float]]) -> str:
  """Two ways beside each other, in seconds or counted."""
  (one, first), (other, second) = ways.items()
  if isinstance(first, float):
    ratio = f'ratio {first / second:.2f}'
    return f'{one} {first:.4f} s, {other} {second:.4f} s, {ratio}'
  words = '{:.2f} GFLOP and {:.2f} GB'.format
  return f'{one} {words(*first)}, {other} {words(*second)}'


if __name__ == '__main__':
  main(
    counted if '--counted' in sys.argv[1:] else seconds,
    '--published' in sys.argv[1:],
  )
