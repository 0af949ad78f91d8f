"""Cycles of a program, against a sum by hand."""

from rlinf_jax.planning.compiled import cycles, hlo
from tests.rlinf_jax.planning.compiled import hlo_test

# The product in the loop of three turns has an estimate, and that of the fusion
# has the number by which XLA says that it has none.
KNOWN, UNKNOWN = (
  '"estimated_cycles":"70"',
  '"estimated_cycles":"9223372036854775807"',
)


def program():
  text = hlo_test.LOOP.replace('@KNOWN@', hlo_test.KNOWN)
  text = text.replace(
    ', metadata={op_name="jit(f)/while/body/dot_general"}',
    f', backend_config={{{KNOWN}}}',
  )
  return text.replace(
    'calls=%fused', f'calls=%fused, backend_config={{{UNKNOWN}}}'
  )


def test_estimates_count_as_often_as_their_loop_turns():
  in_loop, fused = cycles.cycles(hlo.parse(program()))
  assert in_loop[:3] == ('products', 3, 3 * 70) and in_loop.flops
  assert fused == ('kernels', 1, 0, hlo_test.PRODUCT)
  assert in_loop.least(100.0, in_loop.flops) == ('products', 3, 2.1, 1.0)
  assert fused.least(100.0, 2 * hlo_test.PRODUCT) == ('kernels', 1, 0.5, 0.5)


def test_an_estimate_of_a_fusion_has_its_product():
  text = program().replace(UNKNOWN, '"estimated_cycles":"5"')
  in_loop, fused = cycles.cycles(hlo.parse(text))
  assert in_loop[:3] == ('products', 3, 3 * 70)
  assert fused == ('products', 1, 5, hlo_test.PRODUCT)


def test_computing_and_copying_are_apart():
  added = """\
  %c = bf16[4,8]{1,0} convert(%x), backend_config={"estimated_cycles":"7"}
  %s = f32[4,8]{1,0} sort(%x), backend_config={"estimated_cycles":"5"}
  %d = f32[4,8]{1,0} copy(%x), backend_config={"estimated_cycles":"2"}
  ROOT %t"""
  text = program().replace('  ROOT %t', added)
  found = {x.kind: x[1:] for x in cycles.cycles(hlo.parse(text))}
  assert found['elementwise'] == (3, 3 * (7 + 5), 0.0)
  assert found['copies'] == (3, 3 * 2, 0.0)


def test_a_program_without_estimates_has_no_cycles():
  text = program().replace('"estimated_cycles"', '"cycles"')
  assert cycles.cycles(hlo.parse(text)) == []
