"""Compiling the stages of a plan, here for virtual devices of the processor."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import compile_tiny
import matrices
from planner.ir import plan as plan_lib
from planner.search import result as result_lib
from rlinf_jax.planning.compiled import (
  errors,
  executable,
  plan_compiler,
  report,
)
from rlinf_jax.planning.compiled import topology as topology_lib
from rlinf_jax.runtime.places import place as place_lib
from sharding import mesh

AXES = (('fsdp', 2), ('tensor', 2))


def plan(axes=AXES, devices=4):
  placement = plan_lib.Placement(tuple(range(devices)), axes)
  return plan_lib.one_place(matrices.flow().stages, placement)


def compiler(**kwargs):
  return compile_tiny.compiler(matrices.flow(), jax.devices(), **kwargs)


@functools.cache
def compiled():
  return compiler().compile(plan())


def test_products_in_a_loop_that_jax_compiled():
  """Five turns of a product of [8, 16] and [16, 16]; rows on four devices."""
  devices = mesh.mesh(jax.devices()[:4], {'data': 4})
  rows = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec('data'))
  whole = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec())

  def run(x_BD, w_DD):
    x_BD = jax.lax.fori_loop(0, 5, lambda _, y_BD: jnp.tanh(y_BD @ w_DD), x_BD)
    return x_BD.sum(0)

  shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 16), (16, 16))]
  made = jax.jit(run, in_shardings=[rows, whole], out_shardings=whole)
  found = executable.read(made.lower(*shapes).compile(), (('data', 4),))
  assert found.matmul_flops == 5 * 2 * (8 / 4) * 16 * 16
  assert found.unknown_loops == 0
  (add,) = found.collectives
  assert add == ('all-reduce', 'data', 1, 2 * 3 / 4 * 16 * 4)
  assert found.memory.arguments == (8 / 4 + 16) * 16 * 4


def test_bytes_of_a_stage_are_those_of_its_values():
  """A fourth of each matrix of 512 bytes lies on each device."""
  gradient, apply = compiled().stages
  assert [gradient.name, apply.name] == ['gradient', 'apply']
  memory = gradient.executable.memory
  assert memory.arguments == 2 * 512 / 4 + 4 * 8 * 4 / 2  # Rows are halved.
  assert memory.outputs >= 2 * 512 / 4
  assert gradient.modeled.others == 2 * 512 / 4  # The moments.
  assert apply.executable.memory.arguments == 6 * 512 / 4
  assert apply.executable.memory.donated >= 4 * 512 / 4
  assert apply.modeled.others == 0
  assert gradient.total == memory.needed + 2 * 512 / 4


def test_a_model_counts_the_products_that_the_compiler_makes():
  gradient, apply = compiled().stages
  # Three products: forward of two matrices, backward of both, and of the
  # hidden layer; each of 4 rows, on four devices.
  assert gradient.executable.matmul_flops == 5 * 2 * 4 * 8 * 16 / 4
  assert gradient.modeled.matmul_flops == gradient.executable.matmul_flops
  assert apply.executable.matmul_flops == 0
  assert {x.axis for x in gradient.executable.collectives} >= {'fsdp', 'tensor'}


def test_a_plan_that_overflows_a_device_is_refused_and_the_next_one_chosen():
  """Four devices hold a fourth of what one would."""
  small, large = plan((), 1), plan((('fsdp', 4),), 4)
  sizes = [
    max(stage.total for stage in compiler().compile(some).stages)
    for some in (small, large)
  ]
  tight = compiler(memory=sum(sizes) / 2 / 0.9)  # A tenth is in reserve.
  choice = plan_compiler.first_accepted(
    tight, search(small, 2.0), [(small, 2.0), (large, 4.0)]
  )
  assert choice.result.best == large and choice.result.gap == 0.5
  ((refused, words),) = choice.refused
  assert refused == small and choice.result.infeasible[0] == (small, words)
  assert 'more than the' in words and 'that are usable.' in words
  none = plan_compiler.first_accepted(tight, search(small, 2.0), [(small, 2.0)])
  assert none.result.best is None and none.compiled is None
  nearest, found = none.nearest
  assert nearest == small and found.refused == 'gradient'
  usable = tight.model.cluster.capacity
  assert found.lacks == found.stages[-1].total - usable > 0
  assert {stage.usable for stage in found.stages} == {usable}


def test_a_refused_plan_is_followed_by_those_that_relieve_it():
  """If they are faster than the next plan; each is compiled once."""
  small, large, other = plan((), 1), plan((('fsdp', 4),), 4), plan()
  sizes = [
    max(stage.total for stage in compiler().compile(some).stages)
    for some in (small, large)
  ]
  asked = []

  def relieved(refused, stage):
    asked.append((refused, stage))
    return [(large, 3.0), (small, 3.5)]

  choice = plan_compiler.first_accepted(
    compiler(memory=sum(sizes) / 2 / 0.9),
    search(small, 2.0),
    [(small, 2.0), (other, 4.0)],
    relieved,
  )
  assert choice.result.best == large and asked == [(small, 'gradient')]
  assert choice.ranked == [(large, 3.0), (other, 4.0)]
  assert choice.result.seconds == 3.0
  assert choice.result.gap == 1 - 2.0 / 3.0


def search(plan, seconds):
  fields = dict.fromkeys(
    f.name for f in dataclasses.fields(result_lib.SearchResult)
  )
  fields |= {'best': plan, 'seconds': seconds, 'bound': 2.0, 'gap': 0.0}
  return result_lib.SearchResult(**(fields | {'infeasible': []}))


def refused(monkeypatch, used):
  def refuse(self, flow, node, donate, passed, streamed, rounded):
    raise jax.errors.JaxRuntimeError(
      'RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.\n\n'
      f'Used {used} hbm.' + ' More lines.' * 99
    )

  monkeypatch.setattr(place_lib.Place, 'compile', refuse)
  return compiler().compile(plan())


def test_a_compilers_error_is_a_sentence(monkeypatch):
  found = refused(monkeypatch, '18.2G of 15.75G')
  assert not found.stages
  assert 'does not compile: RESOURCE_EXHAUSTED: Ran out of' in found.refusal
  assert len(found.refusal) < 600 and '\n' not in found.refusal
  # Of the values, the moments are no argument, a fourth on each device.
  assert found.lacks == 18.2 * 2**30 + 2 * 512 / 4 - 0.9 * 4e9


def test_what_a_cluster_file_has_room_for_lacks_no_known_bytes(monkeypatch):
  found = refused(monkeypatch, '2.0G of 1.0G')
  assert found.refused and found.lacks is None


def test_the_memory_that_a_refused_program_needs_is_read_from_the_error():
  said = 'memory required for HLO temporaries (7.54G) exceeds available HBM'
  assert errors.needed_bytes(RuntimeError(f'The total {said} (7.52G).')) == (
    7.54 * 2**30
  )
  assert errors.needed_bytes(RuntimeError('INTERNAL: no 7.54G.')) is None
  kernel = 'Ran out of memory in memory space vmem. Used 19.2M of 16.0M vmem.'
  assert errors.needed_bytes(RuntimeError(kernel)) is None


def test_devices_that_cannot_form_a_mesh_refuse_a_plan():
  few = compile_tiny.compiler(matrices.flow(), jax.devices()[:2])
  found = few.compile(plan())
  assert not found.stages and 'wants device 2, and there are 2' in found.refusal


def test_the_report_names_stages_and_numbers():
  data = report.to_data(compiled(), topology_lib.parse('cpu:4'))
  text = '\n'.join(report.text(data))
  for words in ('cpu:4', 'gradient', 'tagged compiled', 'gradient sends: '):
    assert words in text
  assert report.text(None) == []
