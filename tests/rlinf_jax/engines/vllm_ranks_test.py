"""vLLM on several devices: each has a process, and a shard or a copy."""

import time

import jax
import numpy as np

from rlinf_jax.engines import vllm_engine
from sharding import mesh as mesh_lib
from sharding import rules
import vllm_models

pytestmark = vllm_models.marks


def placed(params, **axes):
  """Parameters on a place with a mesh of some axes."""
  size = int(np.prod([*axes.values()]))
  mesh = mesh_lib.mesh(jax.devices()[:size], axes)

  def put(path, x):
    letters = rules.dimensions(path, x.shape)
    spec = rules.partition_spec(mesh, letters, x.shape)
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

  return jax.tree_util.tree_map_with_path(put, params)


def engines(case, *devices):
  """The engine of each copy of the model."""
  return [
    vllm_engine.get(
      case.settings._replace(devices=own, processes=sum(map(len, devices)))
    )
    for own in devices
  ]


def test_a_divided_model_completes_as_one_that_is_not(case):
  policy, prompt = case.policy(), vllm_models.prompts(32)
  for seed in range(2):
    params = jax.tree.map(
      lambda x: x * (1 + 0.1 * seed), policy.init(jax.random.key(0))
    )
    t = time.time()
    got = vllm_models.act(policy, placed(params, tensor=2), prompt, greedy=True)
    print('tp', time.time() - t)
    t = time.time()
    want = vllm_models.act(policy, params, prompt, greedy=True)
    print('one', time.time() - t)
    np.testing.assert_array_equal(got.action, want.action)
    vllm_models.assert_close_where_real(got.logp, want.logp, got.mask)
    own = case.policy(engine=None)
    own = vllm_models.act(own, params, prompt, greedy=True)
    np.testing.assert_array_equal(got.action, own.action)
    vllm_models.assert_close_where_real(got.logp, own.logp, got.mask)
