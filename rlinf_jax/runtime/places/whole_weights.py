"""Options of XLA's compiler with which gradients gather whole weights.

By default, XLA for TPUs splits a product with a weight that devices share into
steps, so that its parts travel behind the products of other parts. Each step
adds to sums of the product's size in memory, which takes longer than the
products of a gradient of 7B themselves. See experiments/compiled.
"""

from collections.abc import Mapping
import types

import jax

from planner.costs.mesh import collectives, layout
from planner.ir import graph

# JAX's names of the chips for which programs with these options were compiled.
KINDS = ('TPU v5', 'TPU v5p')
OPTIONS = types.MappingProxyType(
  {
    # No product is split, and weights are gathered behind what comes before.
    'xla_jf_spmd_threshold_for_windowed_einsum_mib': 1000000,
    'xla_enable_async_all_gather': True,
    'xla_tpu_enable_async_collective_fusion': True,
    'xla_tpu_enable_async_collective_fusion_fuse_all_gather': True,
    'xla_tpu_enable_async_collective_fusion_multiple_steps': True,
    'xla_tpu_overlap_compute_collective_tc': True,
  }
)
NONE = types.MappingProxyType({})


def options(
  device: jax.Device,
  mesh: jax.sharding.Mesh | None,
  flow: graph.Flow,
  node: graph.Node,
  rules: layout.Rules,
) -> Mapping[str, bool | int]:
  """Returns the options for a call; none unless it gathers whole weights.

  It is as `collectives.Parameters.gathers_whole` has it, on chips of `KINDS`.

  Args:
    device: one of those that the call runs on.
    mesh: of its devices; None for a single one.
    flow: that the call belongs to.
    node: the call of a stage.
    rules: mesh axes of each letter.
  """
  if mesh is None or device.device_kind not in KINDS:
    return NONE
  parameters = collectives.Parameters(flow, node, layout.Layout(rules))
  axes = tuple(mesh.shape.items())
  return OPTIONS if parameters.gathers_whole(axes) else NONE
