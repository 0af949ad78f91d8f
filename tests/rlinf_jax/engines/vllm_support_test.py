"""Models that vLLM would compute in another way are refused, by name."""

from concurrent import futures
import importlib.util
import math

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from planner.costs.mesh import layout as layout_lib
from planner.counting import count
from planner.ir import plan as plan_lib
from rlinf_jax.engines import vllm, vllm_memory, vllm_place
from rlinf_jax.runtime.places import place as place_lib
from rlinf_jax.system import memory
from sharding import mesh as mesh_lib
from sharding import rules
import stages
from stages import workflows
from stages.language import sample
from stages.models import families, transformer
from stages.models.files import decoder_names
import tiny

SMALL = {'V': 23, 'D': 12, 'L': 2, 'H': 2, 'K': 1, 'W': 6, 'F': 17}
REFUSED = {
  'not tried with mixtures of experts': (
    'qwen3_moe',
    {'qk_norm': True, 'E': 3, 'experts_per_token': 2, 'qkv_bias': False},
  ),
  'no bias at the output of the attention of Qwen3': (
    'qwen3',
    {'qk_norm': True, 'out_bias': True},
  ),
  'uses the embedding as the output layer of Gemma 2': (
    'gemma2',
    {
      'qkv_bias': False,
      'activation': 'gelu_tanh',
      'unit_offset': True,
      'post_norms': True,
      'scale_embeddings': True,
      'tie_embeddings': False,
    },
  ),
  'not tried with the sliding windows of Qwen2': (
    'qwen2',
    {'windows': (None, 3)},
  ),
  'here 2 heads of width 8 are in a model of width 12': ('qwen2', {'W': 8}),
}


@pytest.mark.parametrize('words', REFUSED)
def test_a_model_that_vllm_would_get_wrong_is_refused(
  words, tmp_path, monkeypatch
):
  model_type, settings = REFUSED[words]
  config = transformer.Config(**SMALL | settings)
  families.write(tmp_path, config, model_type)
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name)
  with pytest.raises(ValueError, match=f'{words}: leave the engine out'):
    vllm.engine(
      None,
      checkpoint=str(tmp_path),
      config=config,
      names=decoder_names.NAMES,
      response_length=3,
      stop=(),
      sampling=sample.Sampling(),
    )


@pytest.mark.parametrize(
  ('settings', 'want'),
  [
    # Of four heads, each rank has as many; one head of keys is copied.
    ({'H': 4, 'K': 1, 'F': 16}, (1, 2, 4)),
    ({'H': 4, 'K': 2, 'F': 16}, (1, 2, 4)),
    ({'H': 4, 'K': 2, 'F': 18}, (1, 2)),
    # Three ranks would divide heads and units, but not 64 rows of logits.
    ({'H': 6, 'K': 2, 'F': 18}, (1, 2)),
    ({'H': 6, 'K': 3, 'F': 18, 'V': 129}, (1, 3, 6)),
    ({'H': 28, 'K': 4, 'F': 18944, 'V': 152064}, (1, 2, 4)),
  ],
)
def test_ranks_divide_heads_units_and_the_padded_vocabulary(settings, want):
  config = transformer.Config(**SMALL | settings)
  assert vllm_place.ranks(config) == want


def test_engines_reserve_what_rows_need_or_what_is_left(monkeypatch):
  settings = {'H': 4, 'K': 2, 'W': 8, 'L': 3, 'D': 16, 'F': 32, 'V': 64}
  config = transformer.Config(**SMALL | settings)
  params = transformer.init_params(config, jax.random.key(0))
  size = sum(4 * x.size for x in jax.tree.leaves(params))
  assert vllm_memory.parameter_bytes(config) == size
  token = 3 * 2 * 2 * 8 * 4  # Layers, keys and values, heads, width, bytes.
  for n, want in ((1, token), (2, token / 2), (4, token / 2)):
    assert vllm_memory.token_bytes(config, n) == want
  free = 1e12
  monkeypatch.setattr(vllm_memory, 'free_bytes', lambda *args: free)
  block = 128 * token
  # 130 tokens take two blocks.
  assert vllm_memory.reserved(config, 5, 130) == (5 * 2 + 1) * block
  two = vllm_memory.reserved(config, 5, 130, (0, 1), 2)
  assert two == (5 * 2 + 1) * block / 2
  free = (size + 4 * block) / 0.9 + 1
  assert vllm_memory.reserved(config, 5, 130) == pytest.approx(4 * block, abs=1)
  free = (size + 2 * block) / 0.9
  with pytest.raises(ValueError, match='one completion of 130 tokens.*free: '):
    vllm_memory.reserved(config, 5, 130)


def modeled(policy, prompt_length):
  """Bytes that a planner counts for keys and values of an engine."""
  workflow = workflows.grpo(policy, tiny.even, optax.sgd(0.1), group_size=2)
  flow = tiny.trace(workflow, tiny.problem(columns=prompt_length))
  node = next(node for node in flow.nodes if node.name == 'generate')
  call = count.of_node(flow, node)
  found = call.bytes(flow, node, (), layout_lib.Layout(rules.DEFAULT), 1, None)
  return found['keys and values of the engine'].value


@pytest.mark.parametrize(
  ('prompt', 'response', 'limit'),
  [(512, 1024, None), (2048, 2048, None), (100, 30, None), (100, 30, 500)],
)
def test_planners_count_the_memory_that_engines_reserve(
  prompt, response, limit, tmp_path, monkeypatch
):
  config = tiny.CONFIG
  families.write(tmp_path, config, 'qwen2')
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name)
  monkeypatch.setattr(vllm_memory, 'free_bytes', lambda *args: 1e15)
  policy = vllm.engine(
    tiny.policy(length=response),
    checkpoint=str(tmp_path),
    config=config,
    names=decoder_names.NAMES,
    response_length=response,
    stop=(0,),
    sampling=sample.Sampling(),
    max_model_len=limit,
  )
  want = vllm_memory.reserved(config, 256, limit or prompt + response)
  first = vllm_memory.BLOCK * vllm_memory.token_bytes(config)  # Is empty.
  assert modeled(policy, prompt) == want - first


def test_processes_of_a_place_share_the_free_memory(monkeypatch):
  monkeypatch.setattr(memory, 'available', lambda: 12e9)
  found = [vllm_memory.free_bytes((0,), n) for n in (0, 1, 3)]
  assert found == [12e9, 12e9, 4e9]


def placed(**axes):
  """An array on a mesh."""
  size = np.prod([*axes.values()], dtype=int)
  mesh = mesh_lib.mesh(jax.devices()[:size], axes)
  return jax.device_put(np.zeros(8), jax.sharding.NamedSharding(mesh, P()))


@pytest.mark.parametrize(
  ('axes', 'want'),
  [
    ({'tensor': 2}, ((0, 1),)),
    ({'data': 2}, ((0,), (1,))),
    ({'fsdp': 3}, ((0,), (1,), (2,))),
    ({'data': 2, 'tensor': 2}, ((0, 1), (2, 3))),
    ({'tensor': 2, 'data': 2}, ((0, 2), (1, 3))),
    ({'data': 2, 'tensor': 2, 'fsdp': 2}, ((0, 2), (1, 3), (4, 6), (5, 7))),
  ],
)
def test_the_mesh_of_a_place_says_which_devices_hold_a_copy(axes, want):
  found = vllm_place.copies({'x': placed(**axes)})
  assert found == (want, math.prod(axes.values()))


def test_the_only_device_of_a_place_needs_no_process():
  for x in (np.zeros(3), jax.device_put(np.zeros(3), jax.devices()[1])):
    assert vllm_place.copies({'x': x}) == (((),), 0)


@pytest.mark.parametrize('rows', [12, 4, 2, 0])
def test_engines_get_whole_groups_of_all_rows(rows):
  parts = vllm_place.parts(rows, 2, 4)
  assert len(parts) == 4
  assert [i for some in parts for i in range(rows)[some]] == [*range(rows)]
  sizes = [len(range(rows)[some]) for some in parts]
  assert all(size % 2 == 0 for size in sizes)
  assert max(sizes) - min(sizes) <= 2


def test_engines_stop_by_the_rows_that_have_ended_in_all_of_them():
  first, second = vllm_place.shared_stop(
    lambda ended: ended == {0, 2, 3}, [slice(0, 2), slice(2, 4)]
  )
  assert not first({0})
  assert not second({0})
  assert second({0, 1})
  assert first({0})


def test_if_one_engine_fails_the_others_are_not_waited_for():
  failed, left = futures.Future(), futures.Future()
  joined = vllm_place.Joined([failed, left])
  assert not joined.done()
  failed.set_exception(RuntimeError('out of memory'))
  with pytest.raises(RuntimeError, match='out of memory'):
    joined.result()
  assert left.cancelled() and joined.done()


def test_a_mesh_that_cannot_divide_the_model_of_an_engine_is_refused():
  policy = tiny.policy()
  policy = policy._replace(
    out_shapes=lambda params, prompt, key_B: jax.eval_shape(
      tiny.policy().act, params, prompt, key_B
    ),
    engine=stages.EngineCost(
      policy.act, 1e9, lambda *shapes: 1e6, 8, ranks=(1, 2)
    ),
  )
  workflow = workflows.grpo(policy, tiny.even, optax.sgd(0.1), group_size=2)
  flow = tiny.trace(workflow, tiny.problem())
  node = next(node for node in flow.nodes if node.name == 'generate')

  def place(**axes):
    devices = tuple(range(math.prod(axes.values())))
    at = plan_lib.Placement(devices, tuple(axes.items()))
    return place_lib.Place('actor', at, {})

  for axes in ({'tensor': 2}, {'data': 3}, {'data': 3, 'tensor': 2}):
    place(**axes).check_node(flow, node)
  words = r"\(1, 2\) devices.*'actor' divides it between 4 .*'data' instead"
  with pytest.raises(ValueError, match=words):
    place(data=2, tensor=4).check_node(flow, node)
