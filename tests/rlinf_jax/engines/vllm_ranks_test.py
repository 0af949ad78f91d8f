"""vLLM on several devices: each has a process, with a shard or a copy."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import in_memory
from planner.ir import plan as plan_lib
from rlinf_jax.engines import vllm_engine
from rlinf_jax.prepare import warm_start
from rlinf_jax.runtime import local
from sharding import mesh as mesh_lib
from sharding import rules
from stages import workflows
from stages.language import huggingface
from stages.learn import optimizers
from stages.models import lora as lora_lib
from stages.models.files import weights
from stages.tasks import arithmetic
import tiny
import vllm_models

pytestmark = vllm_models.marks


@pytest.fixture(scope='module')
def divided(case):
  """The policy of the model, whose parameters two devices divide."""
  policy = case.policy()
  yield policy, placed(policy.init(jax.random.key(0)), tensor=2)
  engine(case).close()


def placed(params, **axes):
  """Parameters on a place with a mesh of some axes."""
  size = int(np.prod([*axes.values()]))
  mesh = mesh_lib.mesh(jax.devices()[:size], axes)

  def put(path, x):
    letters = rules.dimensions(path, x.shape)
    spec = rules.partition_spec(mesh, letters, x.shape)
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

  return jax.tree_util.tree_map_with_path(put, params)


def engine(case, devices=(0, 1), processes=2):
  """The engine of one copy of the model."""
  settings = dataclasses.replace(
    case.settings, devices=devices, processes=processes
  )
  return vllm_engine.get(settings)


def ranks():
  """The processes of vLLM's ranks."""
  return [
    child
    for child in psutil.Process().children(recursive=True)
    if 'Worker' in ' '.join(child.cmdline())  # A title that vLLM sets.
  ]


def assert_same(got, want):
  np.testing.assert_array_equal(got.action, want.action)
  np.testing.assert_array_equal(got.mask, want.mask)
  vllm_models.assert_close_where_real(got.logp, want.logp, got.mask)


@pytest.mark.parametrize('held', ['float32', 'bfloat16'])
def test_shared_tensors_are_written_once_in_the_type_of_the_engine(case, held):
  from rlinf_jax.engines import vllm_weights

  names = huggingface.names(case.folder)
  params = jax.tree.map(
    lambda x: x.astype(held), case.policy().init(jax.random.key(0))
  )
  shared, found = vllm_weights.SharedTensors('bfloat16'), []
  for scale in (1, 2):
    params = jax.tree.map(lambda x: x * jnp.asarray(scale, held), params)
    table = shared.write(placed(params, fsdp=2, tensor=2), names)
    want = dict(weights.checkpoint_tensors(params, names))
    assert table.keys() == want.keys()
    for name, (memory, offset, shape) in table.items():
      path = pathlib.Path(memory)
      # Nothing in /dev/shm, which containers keep small.
      assert str(path.readlink()).startswith('/memfd:')
      with path.open('rb') as file:
        file.seek(offset)
        x = np.frombuffer(file.read(2 * int(np.prod(shape))), jnp.bfloat16)
      rounded = np.asarray(want[name].astype('bfloat16'))
      np.testing.assert_array_equal(x.reshape(shape), rounded, err_msg=name)
    found.append({name: place[:2] for name, place in table.items()})
  assert found[0] == found[1]
  shared.close()
  assert not path.exists()


def test_devices_round_what_goes_through_the_memory_of_the_host(case):
  from rlinf_jax.engines import vllm_weights

  names = huggingface.names(case.folder)
  params = placed(case.policy().init(jax.random.key(0)), fsdp=2, tensor=2)
  sent = list(vllm_weights.tensors(params, names, 'bfloat16'))
  types = {x.dtype for some in sent for x in some.values()}
  assert {str(kind) for kind in types} == {'torch.bfloat16'}


def test_after_every_update_greedy_completions_are_those_of_one_rank(
  case, divided
):
  policy, params = divided
  prompt, seen = vllm_models.prompts(32), []
  for seed in range(3):
    params = jax.tree.map(lambda x: x * (1 + 0.2 * seed), params)
    got = vllm_models.act(policy, params, prompt, greedy=True)
    whole = jax.tree.map(np.asarray, params)
    one = jax.device_put(whole, jax.devices()[0])
    assert_same(got, vllm_models.act(policy, one, prompt, greedy=True))
    own = case.policy(engine=None)
    assert_same(got, vllm_models.act(own, one, prompt, greedy=True))
    seen.append(np.asarray(got.action).tobytes())
  assert len(set(seen)) == 3 and len(ranks()) == 2
  # Other machines do not reach them.
  ports = [port for rank in ranks() for port in rank.net_connections()]
  open_to = {port.laddr.ip for port in ports if port.status == 'LISTEN'}
  assert open_to <= {'127.0.0.1', '::1'}


def test_samples_are_of_the_distribution_of_the_updated_model(case, divided):
  policy, params = divided
  prompt = vllm_models.prompts()
  x, again = (vllm_models.act(policy, params, prompt, seed=1) for _ in range(2))
  tiny.assert_same_bits(x, again)
  want = case.policy(engine=None).evaluate(
    jax.tree.map(np.asarray, params),
    prompt,
    jnp.asarray(x.action),
    group_size=vllm_models.GROUP,
  )
  vllm_models.assert_close_where_real(x.logp, want.logp, x.mask)


def test_a_plan_gives_the_devices_of_a_place_to_vllm(case, divided):
  del divided
  workflow = workflows.grpo(
    case.policy(),
    tiny.even_on_host,
    optimizers.adamw(3e-3),
    group_size=vllm_models.GROUP,
  )
  batch = tiny.problem(8)
  step = tiny.trace(workflow, batch)
  tensor = {'devices': [0, 1], 'axes': [['tensor', 2]]}
  places = {'actor': tensor, 'learner': {'devices': [2]}}
  where = {'generate': 'actor', '*': 'learner'}
  runtime = local.LocalRuntime(
    plan_lib.parse({'places': places, 'stages': where}, step.stages),
    step=step,
  )
  in_memory.start(runtime, workflow.init(jax.random.key(0)))
  sent = engine(case).weight_version
  for i in range(2):
    info = jax.device_get(runtime.step(batch, jax.random.key(i)))
    # With the parameters of the step before, the gap would be large.
    assert 0 < info['rollout/logprob_gap_mean'].value()[''] < 1e-4
    assert info['rollout/logprob_gap_max'].value()[''] < 1e-3
  assert engine(case).weight_version == sent + 2
  runtime.close()


def test_the_end_of_a_rank_is_named_and_ends_all_ranks(case, divided):
  policy, params = divided
  prompt = vllm_models.prompts()
  vllm_models.act(policy, params, prompt)  # Starts them.
  left = vllm_models.started(policy, params, prompt, seed=0)
  processes = ranks()
  os.kill(processes[1].pid, signal.SIGKILL)
  words = rf'Rank \d of vLLM \(process {processes[1].pid}\) ended with exit '
  with pytest.raises(RuntimeError, match=f'{words}code -9.* starts vLLM again'):
    left.result()
    # It had ended before: the next request fails.
    vllm_models.act(policy, params, prompt, seed=1)
  assert not any(process.is_running() for process in processes)


@pytest.mark.claims
def test_ranks_divide_the_adapter_of_a_model(case):
  adapted = lora_lib.Lora(rank=4)
  policy, prompt = case.policy(lora=adapted), vllm_models.prompts(32)
  params = policy.init(jax.random.key(0))
  for seed in range(2):
    noise = jax.random.key(seed)
    adapter = jax.tree.map(
      lambda x: x + 0.1 * jax.random.normal(noise, x.shape),
      params[lora_lib.ADAPTER],
    )
    params = params | {lora_lib.ADAPTER: adapter}
    own = case.policy(engine=None, lora=adapted)
    assert_same(
      vllm_models.act(policy, placed(params, tensor=2), prompt, greedy=True),
      vllm_models.act(own, params, prompt, greedy=True),
    )
  vllm_engine.get(
    dataclasses.replace(engine(case).settings, lora_rank=4)
  ).close()


@pytest.mark.claims
def test_copies_on_a_place_share_the_rows_of_a_call(case):
  policy = case.policy()
  params, prompt = policy.init(jax.random.key(0)), vllm_models.prompts(10)
  both = placed(params, data=2)
  for settings in ({'greedy': True}, {'seed': 3}):
    got = vllm_models.act(policy, both, prompt, **settings)
    assert_same(got, vllm_models.act(policy, params, prompt, **settings))
  copies = [engine(case, (i,)) for i in range(2)]
  assert [copy.weight_version for copy in copies] == [1, 1]
  for copy in copies:
    copy.close()
  assert not ranks()


@pytest.mark.claims
@pytest.mark.parametrize('how', [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_a_run_that_is_interrupted_or_killed(how, tmp_path):
  model = warm_start.checkpoint(
    str(tmp_path / 'model'),
    corpus=arithmetic.corpus,
    vocabulary=64,
    width=128,  # vLLM's attention on a CPU needs heads of 32.
    layers=2,
    heads=4,
    kv_heads=2,
    feed_forward=64,
  )
  places = {
    'actor': {'devices': [0, 1], 'axes': [['data', 2]]},
    'learner': {'devices': [2]},
  }
  where = {'generate': 'actor', 'answer': 'actor', '*': 'learner'}
  folder = tmp_path / 'run'
  bindings = [
    f'CHECKPOINT = "{model}"',
    'STEPS = 1000',
    'arithmetic.problems.batch_size = 4',
    'arithmetic.problems.held_out = 8',
    'arithmetic.problems.held_out_batch = 8',
    f'train.train.plan = {{"places": {places}, "stages": {where}}}',
  ]
  # A terminal interrupts all processes of a session.
  process = subprocess.Popen(
    [
      *('env', '--default-signal=INT', sys.executable, '-m', 'rlinf_jax.main'),
      *('--gin_file', 'gin_configs/grpo_arithmetic_vllm.gin'),
      *(f'--gin_bindings={binding}' for binding in bindings),
      *('--workdir', str(folder)),
    ],
    cwd=pathlib.Path(__file__).parents[3],
    env=os.environ | {'JAX_NUM_CPU_DEVICES': '3'},
    stdout=subprocess.DEVNULL,
    start_new_session=True,
  )
  lines, deadline = folder / 'metrics.jsonl', time.time() + 300
  while not lines.exists() or len(lines.read_text().splitlines()) < 2:
    assert process.poll() is None, 'The run ended before it was interrupted.'
    assert time.time() < deadline
    time.sleep(0.2)
  started = psutil.Process(process.pid).children(recursive=True)
  assert sum('Worker' in ' '.join(x.cmdline()) for x in started) == 2
  (os.killpg if how == signal.SIGINT else os.kill)(process.pid, how)
  code = process.wait(timeout=60)
  if how == signal.SIGINT:
    assert code == 130
    assert list((folder / 'checkpoints').iterdir())
  _, alive = psutil.wait_procs(started, timeout=30)
  assert not alive
