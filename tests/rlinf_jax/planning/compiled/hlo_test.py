"""The walk over optimized HLO, against counts by hand."""

import pytest

from rlinf_jax.planning.compiled import (
  communication,
  hlo,
  large_arrays,
  matmul_flops,
)

# A loop of three turns, each with a product of [4,8] and [8,16] and a gather
# of [4,8] from the two devices along 'fsdp'; then a product in a fusion.
LOOP = """\
HloModule jit_f, is_scheduled=true, num_partitions=4

%body (p: (s32[], f32[4,8], f32[8,16])) -> (s32[], f32[4,8], f32[8,16]) {
  %p = (s32[], f32[4,8]{1,0}, /*index=2*/f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,8]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %w = f32[8,16]{1,0} get-tuple-element(%p), index=2
  %dot.1 = f32[4,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}, metadata={op_name="jit(f)/while/body/dot_general"}
  %gather = f32[8,8]{1,0} all-gather(%x), channel_id=1, \
replica_groups=[2,2]<=[4], dimensions={0}, use_global_device_ids=true
  ROOT %t = (s32[], f32[4,8]{1,0}, f32[8,16]{1,0}) tuple(%i, %x, %w)
}

%condition (q: (s32[], f32[4,8], f32[8,16])) -> pred[] {
  %q = (s32[], f32[4,8]{1,0}, f32[8,16]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%j, %limit), direction=LT
}

%fused (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,16]{1,0} parameter(1)
  ROOT %dot.2 = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}

ENTRY %main (w: f32[8,16]) -> f32[4,16] {
  %w = f32[8,16]{1,0} parameter(0)
  %x0 = f32[4,8]{1,0} constant({...})
  %zero = s32[] constant(0)
  %init = (s32[], f32[4,8]{1,0}, f32[8,16]{1,0}) tuple(%zero, %x0, %w)
  %loop = (s32[], f32[4,8]{1,0}, f32[8,16]{1,0}) while(%init), \
condition=%condition, body=%body@KNOWN@
  %x1 = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  ROOT %out = f32[4,16]{1,0} fusion(%x1, %w), kind=kOutput, calls=%fused
}
"""
KNOWN = ', backend_config={"known_trip_count":{"n":"3"},"other":{"n":"7"}}'
PRODUCT = 2 * 4 * 8 * 16
AXES = (('data', 2), ('fsdp', 2))


def module(known=KNOWN):
  return hlo.parse(LOOP.replace('@KNOWN@', known))


def test_a_loop_counts_as_often_as_it_turns():
  assert matmul_flops.matmul_flops(module()) == 3 * PRODUCT + PRODUCT


def test_a_loop_without_a_count_turns_as_often_as_its_condition_allows():
  assert matmul_flops.matmul_flops(module('')) == 5 * PRODUCT + PRODUCT


def test_a_loop_that_may_end_early_turns_as_often_as_its_counter_allows():
  """Its condition has other constants, here the number of this device's row."""
  other = '%row = s32[] constant(7)\n  %limit = s32[] constant(5)'
  text = LOOP.replace('@KNOWN@', '').replace(
    '%limit = s32[] constant(5)', other
  )
  assert matmul_flops.matmul_flops(hlo.parse(text)) == 5 * PRODUCT + PRODUCT


def test_a_loop_whose_condition_is_fused_turns_as_often_as_its_counter_allows():
  """As one part of decoding, whose rows have other limits than its counter."""
  fused = """
%fused_less (c: s32[]) -> pred[] {
  %c = s32[] parameter(0)
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%c, %limit), direction=LT
}

%fused_rows (r: s32[4]) -> pred[4] {
  %r = s32[4]{0} parameter(0)
  %most = s32[] constant(9)
  %all = s32[4]{0} broadcast(%most), dimensions={}
  ROOT %rows = pred[4]{0} compare(%r, %all), direction=LT
}

%condition ("""
  text = LOOP.replace('@KNOWN@', '').replace('\n%condition (', fused, 1)
  text = text.replace(
    """  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%j, %limit), direction=LT
}

%fused (""",
    """  %lengths = s32[4]{0} broadcast(%j), dimensions={}
  %rows = pred[4]{0} fusion(%lengths), kind=kLoop, calls=%fused_rows
  ROOT %less = pred[] fusion(%j), kind=kLoop, calls=%fused_less
}

%fused (""",
  )
  assert 'calls=%fused_less' in text
  assert matmul_flops.matmul_flops(hlo.parse(text)) == 5 * PRODUCT + PRODUCT


def test_the_counter_of_a_loop_is_that_without_which_it_ends():
  """As on a TPU, which compares one more number for some of the rows."""
  less = 'ROOT %less = pred[] compare(%j, %limit), direction=LT'
  some = """%more = s32[] constant(9)
  %row = pred[] compare(%j, %more), direction=LT
  %rows = pred[4]{0} broadcast(%row), dimensions={}
  %any = pred[] reduce(%rows, %row), dimensions={0}, to_apply=%or
  %less = pred[] compare(%j, %limit), direction=LT
  ROOT %both = pred[] and(%any, %less)"""
  text = LOOP.replace('@KNOWN@', '').replace(less, some)
  assert '%both' in text
  assert matmul_flops.matmul_flops(hlo.parse(text)) == 5 * PRODUCT + PRODUCT


def test_an_unrolled_loop_turns_as_often_as_its_step_fits_into_its_limit():
  # XLA makes two turns of a windowed product one, and counts by two.
  by_two = (
    '%two = s32[] constant(2)\n  %next = s32[] add(%i, %two)\n'
    '  %x = f32[4,8]{1,0:T(8,128)}'
  )
  text = LOOP.replace('@KNOWN@', '').replace('tuple(%i, ', 'tuple(%next, ')
  text = text.replace('%x = f32[4,8]{1,0:T(8,128)}', by_two)
  assert matmul_flops.matmul_flops(hlo.parse(text)) == 3 * PRODUCT + PRODUCT


def test_a_loop_of_unknown_end_counts_once():
  text = LOOP.replace('@KNOWN@', '').replace('constant(5)', 'parameter(1)')
  read = hlo.parse(text)
  (loop,) = (
    x.instruction for x in hlo.walk(read) if x.instruction.opcode == 'while'
  )
  assert hlo.trip_count(read, loop) is None
  assert matmul_flops.matmul_flops(read) == 2 * PRODUCT


def test_collectives_have_an_axis_a_count_and_the_bytes_of_a_ring():
  (found,) = communication.collectives(module(), AXES)
  # To gather two shards of 4 × 8 × 4 bytes, a device sends one of them.
  assert found == ('all-gather', 'fsdp', 3, 3 * 4 * 8 * 4)


def test_results_inside_a_fusion_are_not_written_to_memory():
  found = large_arrays.large_arrays(module())
  assert [(str(x.array), x.times) for x in found] == [
    ('f32[4,16]', 3),  # In the loop.
    ('f32[8,8]', 3),
    ('f32[4,16]', 1),  # The result of the fusion.
    ('f32[4,8]', 1),
    ('s32[]', 1),
  ]
  assert found[0].op_name == 'jit(f)/while/body/dot_general'


@pytest.mark.parametrize(
  'text, groups',
  [
    ('replica_groups={{0,1},{2,3}}', [(0, 1), (2, 3)]),
    ('replica_groups=[2,2]<=[4]', [(0, 1), (2, 3)]),
    ('replica_groups=[2,2]<=[2,2]T(1,0)', [(0, 2), (1, 3)]),
    ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", [(0, 2), (1, 3)]),
    ("replica_groups=mesh['a'=2,'b'=1,'c'=2] {'b','c'}", [(0, 1), (2, 3)]),
    (
      "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, x",
      [(0, 1), (2, 3)],
    ),
    ('replica_groups={}', [(0, 1, 2, 3)]),
  ],
)
def test_groups_of_devices(text, groups):
  assert communication.replica_groups(text, 4) == groups


def test_axes_of_groups():
  axis = communication.axis_of_groups
  assert axis([(0, 1), (2, 3)], AXES) == 'fsdp'
  assert axis([(0, 2), (1, 3)], AXES) == 'data'
  assert axis([(0, 1, 2, 3)], AXES) == 'data+fsdp'
  assert axis([(0, 3), (1, 2)], AXES) == '?'
  assert communication.axis_of_pairs([(0, 2), (3, 1)], AXES) == 'data'


def test_a_tpu_scatters_the_sum_of_a_fusion_of_that_name():
  text = """HloModule m, num_partitions=4

%all-reduce-scatter.3 (a: f32[8]) -> f32[2] {
  %a = f32[8]{0} parameter(0)
  %sum = f32[8]{0} all-reduce(%a), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %slice = f32[2]{0} dynamic-slice(%sum), dynamic_slice_sizes={2}
}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

ENTRY %main (a: f32[8]) -> f32[2] {
  %a = f32[8]{0} parameter(0)
  ROOT %f = f32[2]{0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.3
}
"""
  (found,) = communication.collectives(hlo.parse(text), (('fsdp', 4),))
  assert found == ('reduce-scatter', 'fsdp', 1, 0.75 * 8 * 4)


def test_a_gather_in_steps_of_a_loop_is_one_gather():
  gather = (
    'f32[8]{0} all-gather(%a), channel_id=7, replica_groups={{0,1,2,3}}, '
    'dimensions={0}, frontend_attributes={chain_id="0"}'
  )
  text = f"""HloModule m, num_partitions=4

%first (a: f32[2]) -> f32[8] {{
  %a = f32[2]{{0}} parameter(0)
  ROOT %g = {gather}
}}

%next (a: f32[2]) -> f32[8] {{
  %a = f32[2]{{0}} parameter(0)
  ROOT %g = {gather}
}}

%body (p: (s32[], f32[2])) -> (s32[], f32[2]) {{
  %p = (s32[], f32[2]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[2]{{0}} get-tuple-element(%p), index=1
  %step = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%next
  ROOT %t = (s32[], f32[2]{{0}}) tuple(%i, %x)
}}

%condition (q: (s32[], f32[2])) -> pred[] {{
  %q = (s32[], f32[2]{{0}}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %limit = s32[] constant(28)
  ROOT %less = pred[] compare(%j, %limit), direction=LT
}}

ENTRY %main (a: f32[2]) -> f32[8] {{
  %a = f32[2]{{0}} parameter(0)
  %start = f32[8]{{0}} fusion(%a), kind=kLoop, calls=%first
  %zero = s32[] constant(0)
  %init = (s32[], f32[2]{{0}}) tuple(%zero, %a)
  %loop = (s32[], f32[2]{{0}}) while(%init), condition=%condition, body=%body
  ROOT %r = f32[8]{{0}} copy(%start)
}}
"""
  (found,) = communication.collectives(hlo.parse(text), (('fsdp', 4),))
  assert found == ('all-gather', 'fsdp', 1, 3 * 2 * 4)


@pytest.mark.parametrize(
  'kind, sent',
  [
    ('all-gather', 3.0),  # To receive the shards of three others.
    ('reduce-scatter', 0.75),
    ('all-reduce', 1.5),  # A scatter, then a gather.
    ('all-to-all', 0.75),
  ],
)
def test_bytes_that_a_device_of_four_sends(kind, sent):
  assert communication._sent(kind, 4) == sent


def convolution(attributes, left, right, out):
  text = f"""HloModule m

ENTRY %main (a: {left}, b: {right}) -> {out} {{
  %a = {left} parameter(0)
  %b = {right} parameter(1)
  ROOT %c = {out} convolution(%a, %b), {attributes}
}}
"""
  return matmul_flops.matmul_flops(hlo.parse(text))


def test_a_product_that_a_tpu_states_as_a_convolution():
  assert (
    convolution('dim_labels=bf_io->bf', 'bf16[4,8]', 'bf16[8,16]', 'bf16[4,16]')
    == PRODUCT
  )


def test_a_batched_product_that_a_tpu_states_as_a_convolution():
  """Five products: each output of the batch sees one input."""
  window = 'window={size=5 stride=4 pad=0_0 lhs_dilate=5}'
  flops = convolution(
    f'{window}, dim_labels=0bf_0io->0bf',
    'bf16[5,4,8]',
    'bf16[5,8,16]',
    'bf16[5,4,16]',
  )
  assert flops == 5 * PRODUCT


def test_a_convolution_counts_only_positions_inside_its_input():
  """Three outputs of a window of three, of which two reach outside by one."""
  flops = convolution(
    'window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f',
    'f32[2,3,4]',
    'f32[3,4,5]',
    'f32[2,3,5]',
  )
  assert flops == 2 * 2 * 4 * 5 * (3 * 3 - 2)


def test_a_product_of_cublas():
  text = """HloModule m

ENTRY %main (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,16]{1,0} parameter(1)
  %c = (f32[4,16]{1,0}, s8[1024]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["0"]}}}
  ROOT %d = f32[4,16]{1,0} get-tuple-element(%c), index=0
}
"""
  assert matmul_flops.matmul_flops(hlo.parse(text)) == PRODUCT


def test_a_kernel_of_attention():
  """Its attributes go over several lines, as libtpu writes them."""
  q, k = 'bf16[2,4,256,64]', 'bf16[2,2,512,64]'
  text = f"""HloModule m

ENTRY %main (m: s8[1,2,4], q: {q}, k: {k}) -> {q} {{
  %m = s8[1,2,4]{{2,1,0}} parameter(0)
  %q = {q}{{3,2,1,0}} parameter(1)
  %k = {k}{{3,2,1,0}} parameter(2)
  %splash_mha_dq_segmented.1 = (f32[128,64]{{1,0}}, {q}{{3,2,1,0}}) \
custom-call(%m, %m, %q, %k, %k), custom_call_target="tpu_custom_call", \
frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{\\"block_q\\": 512, \\"block_q_dq\\": 128, \
\\"block_kv_dq\\": 256}}"
}}}}, metadata={{op_name="jit(f)/pallas_call"}}
  ROOT %d = {q} get-tuple-element(%splash_mha_dq_segmented.1), index=1
}}
"""
  # Of two blocks of keys, both are seen by both blocks of queries.
  pairs = 256 * 512
  assert matmul_flops.matmul_flops(hlo.parse(text)) == 2 * 8 * pairs * 64 * 3


def test_bytes_of_arrays():
  found = hlo.arrays(
    '(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, s4[10], pred[], f8e4m3fn[7])'
  )
  assert [x.bytes for x in found] == [12, 5, 1, 7]


def test_text_that_is_no_module_is_refused():
  with pytest.raises(ValueError, match='no ENTRY computation'):
    hlo.parse('HloModule m')
