"""Between device memory and the host's, without a change of layout."""

import jax


def to_host(x: jax.Array) -> jax.Array:
  """`x` in host memory that its devices can reach; its layout stays."""
  return jax.device_put(x, x.sharding.with_memory_kind('pinned_host'))


def to_device(x: jax.Array) -> jax.Array:
  """`x` in the memory of its devices; itself if it is there."""
  if x.sharding.memory_kind == 'device':
    return x
  return jax.device_put(x, x.sharding.with_memory_kind('device'))
