"""Cycles of a program, against a sum by hand."""

from rlinf_jax.planning.compiled import cycles, hlo

PROGRAM = """\
HloModule jit_f, is_scheduled=true

%fused (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,16]{1,0} parameter(1)
  ROOT %dot.2 = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}

%body (p: (s32[], f32[4,8], f32[8,16])) -> (s32[], f32[4,8], f32[8,16]) {
  %p = (s32[], f32[4,8]{1,0}, f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %w = f32[8,16]{1,0} get-tuple-element(%p), index=2
  %product = f32[4,16]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"70"}}
  %unknown = f32[4,16]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"9223372036854775807"}}
  ROOT %t = (s32[], f32[4,8]{1,0}, f32[8,16]{1,0}) tuple(%i, %x, %w)
}

%condition (q: (s32[], f32[4,8], f32[8,16])) -> pred[] {
  %q = (s32[], f32[4,8]{1,0}, f32[8,16]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%j, %limit), direction=LT
}

ENTRY %main (w: f32[8,16]) -> f32[4,8] {
  %w = f32[8,16]{1,0} parameter(0)
  %x0 = f32[4,8]{1,0} constant({...})
  %zero = s32[] constant(0)
  %init = (s32[], f32[4,8]{1,0}, f32[8,16]{1,0}) tuple(%zero, %x0, %w)
  %loop = (s32[], f32[4,8]{1,0}, f32[8,16]{1,0}) while(%init), \
condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %x1 = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  ROOT %out = f32[4,8]{1,0} copy(%x1), backend_config={"estimated_cycles":"5"}
}
"""


def test_estimates_count_as_often_as_their_loop_turns():
  found = cycles.cycles(hlo.parse(PROGRAM))
  # The product without an estimate has 2 x 4 x 8 x 16 operations.
  assert found == cycles.Cycles(3 * 70 + 5, 3 * 1024)
  assert found.seconds(100.0, 1024.0) == 2.15 + 3


def test_a_program_without_estimates_has_no_cycles():
  text = PROGRAM.replace('"estimated_cycles"', '"cycles"')
  assert cycles.cycles(hlo.parse(text)) is None
