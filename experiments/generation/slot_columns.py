r"""Compiles what slots do with their cache, for a device that need not be here.

  python -m experiments.generation.slot_columns h100:1x1x1
  python -m experiments.generation.slot_columns v5p:2x2x1

A loop writes a column of each slot, attends to the columns that the slots have
filled, and lets a row enter a slot in every thousandth iteration, for one layer
of Qwen2.5 1.5B: by the kernel of the hardware, and without it. Printed are the
temporary memory, the seconds of compiling, and how many arrays as large as the
keys an iteration copies, of which there should be none.
"""

import argparse
import functools
import json
import re
import time

import jax
import jax.numpy as jnp

from rlinf_jax.planning.compiled import topology as topology_lib
from sharding import mesh as mesh_lib
from stages import kernels
from stages.language.decoding import kv_cache
from stages.language.decoding.slots import slot_cache
from stages.models import transformer

CONFIG = transformer.Config(
  V=1, D=1536, L=1, H=12, K=2, W=128, F=1, dtype='bfloat16'
)
SLOTS, PROMPTS, PROMPT, LENGTH = 64, 4, 1024, 27648


def loop(kernel: str, caches, prompt, mask_NP, q_M1HW, size_M, stop):
  """Decodes until `stop` iterations were made."""

  def body(state):
    t, caches, q_M1HW, size_M = state
    caches = jax.lax.fori_loop(
      0,
      (t % 1000 == 0).astype(jnp.int32),
      lambda i, caches: slot_cache.enter(
        caches, prompt, mask_NP, (t + i) % PROMPTS, t % SLOTS
      ),
      caches,
    )
    span = slot_cache.span(size_M, size_M >= 0, None)
    new = q_M1HW[:, :, : CONFIG.K]
    caches, q_M1HW = slot_cache.extend(
      CONFIG, kernel, caches, q_M1HW, new, new, span
    )
    return t + 1, caches, q_M1HW, size_M + 1

  # As a model has read them, by token.
  prompt = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), prompt)
  state = jnp.int32(0), caches, q_M1HW, size_M
  return jax.lax.while_loop(lambda state: state[0] < stop, body, state)


def copies(text: str, size: int) -> int:
  """Copies of arrays of `size` elements in the bodies of loops."""
  bodies = {*re.findall(r'body=%?([\w.-]+)', text)}
  found, name = 0, ''
  for line in text.splitlines():
    head = re.match(r'(?:ENTRY )?%?([\w.-]+) ?\(.*\{\s*$', line)
    name = head[1] if head else name
    shape = re.search(r'= bf16\[([\d,]+)\]\S* (?:copy|transpose)\(', line)
    if name in bodies and shape:
      count = functools.reduce(lambda a, b: a * int(b), shape[1].split(','), 1)
      found += count == size
  return found


def compiled(on, kernel: str) -> dict:
  """Compiles a loop with a kernel, and returns its memory and its copies."""

  def like(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=on)

  def pair(*shape):
    return kv_cache.LayerCache(like(*shape, CONFIG.W), like(*shape, CONFIG.W))

  columns = slot_cache.columns(PROMPT + LENGTH)
  arrays = (
    pair(SLOTS, CONFIG.K, columns),
    pair(PROMPTS, PROMPT, CONFIG.K),
    like(PROMPTS, PROMPT, dtype=jnp.int32),
    like(SLOTS, 1, CONFIG.H, CONFIG.W),
    like(SLOTS, dtype=jnp.int32),
    like(dtype=jnp.int32),
  )
  run = jax.jit(
    functools.partial(loop, kernel), donate_argnums=0, out_shardings=on
  )
  start = time.perf_counter()
  found = run.lower(*arrays).compile()
  temporary = found.memory_analysis().temp_size_in_bytes
  keys = SLOTS * CONFIG.K * columns * CONFIG.W
  return {
    'reads by': kernel,
    'keys and values MiB': 2 * 2 * keys // 2**20,
    'temporary MiB': round(temporary / 2**20, 1),
    'copies': copies(found.as_text(), keys),
    'seconds to compile': round(time.perf_counter() - start, 1),
  }


def main():
  """Prints a line of JSON with the kernel, and one without."""
  parser = argparse.ArgumentParser()
  parser.add_argument('topology')
  topology = topology_lib.parse(parser.parse_args().topology)
  topology_lib.prepare(topology)
  device = topology_lib.devices(topology)[0]
  on = jax.sharding.SingleDeviceSharding(device)
  for kernel in (kernels.DECODING[device.platform], kernels.WHOLE):
    with mesh_lib.on_device(device):
      print(json.dumps(compiled(on, kernel)), flush=True)


if __name__ == '__main__':
  main()
