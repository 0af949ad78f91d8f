"""Reading what a compiler says of its executable."""

import types

from rlinf_jax.planning.compiled import executable


def test_memory_of_a_tpu_is_what_is_alive_at_once_not_what_its_analysis_adds():
  """As of the gradient of two layers of Qwen2.5-7B, in MB; 300 on the host."""
  analysis = types.SimpleNamespace(
    argument_size_in_bytes=778,
    output_size_in_bytes=778,
    alias_size_in_bytes=0,
    temp_size_in_bytes=11144,
    host_argument_size_in_bytes=200,
    host_output_size_in_bytes=200,
    host_alias_size_in_bytes=100,
    host_temp_size_in_bytes=0,
    peak_memory_in_bytes=8096 + 300,
  )
  compiled = types.SimpleNamespace(memory_analysis=lambda: analysis)
  on_tpu = executable.memory(compiled, 'tpu')
  assert on_tpu.needed == 8096
  assert on_tpu.temporary == 8096 - 778 - 778
  # A GPU's block for temporary arrays is one that it allocates.
  assert executable.memory(compiled, 'cuda').needed == 778 + 778 + 11144
