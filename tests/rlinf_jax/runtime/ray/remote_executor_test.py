"""Tests of the executor of a process, with values that other processes send."""

import jax
import jax.numpy as jnp
import numpy as np

from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from planner.lower import program as program_lib
from rlinf_jax.runtime import base, programs
from rlinf_jax.runtime.places import lease as lease_lib
from rlinf_jax.runtime.places import place as place_lib
from rlinf_jax.runtime.ray import remote_executor
from rlinf_jax.runtime.ray.transport import channel
from sharding import offload
import stages


def test_a_value_is_pulled_to_host_memory_where_devices_are_shared(tmp_path):
  act, learn = (stages.Stage(jnp.sin, name) for name in ('act', 'learn'))
  x = jnp.ones((512, 512))
  flow = flow_lib.trace(lambda state, x: (state, learn(act(x))), (), x)
  shared = ['learner', 'other']
  sketch = {
    'places': {'actor': {'devices': [1]}}
    | dict.fromkeys(shared, {'devices': [0]}),
    'stages': {'act': 'actor', 'learn': 'learner'},
    'shared_devices': shared,
  }
  plan = plan_lib.parse(sketch)
  lowered = programs.lower(plan, flow)
  leases = lease_lib.of_plan(plan, tmp_path, ['learner'])
  place = place_lib.Place(
    'learner', plan.places['learner'], {}, lease=leases['learner']
  )
  executor = remote_executor.RemoteExecutor(
    True, {}, None, lowered, {'learner': place}
  )
  (sent,) = (
    op
    for op in lowered['step'].programs['actor']
    if isinstance(op, program_lib.Send)
  )
  offer = channel.Channels('127.0.0.1').pack(x, same_machine=False)
  assert isinstance(offer, channel.Offer)
  to = base.Channel('step', (), sent.value, 'actor', 'learner')
  found = executor.pull(to, offer)
  assert offload.is_offloaded(found)
  np.testing.assert_array_equal(found, x)
  assert found.devices() == {jax.devices()[0]}
  executor.close()
