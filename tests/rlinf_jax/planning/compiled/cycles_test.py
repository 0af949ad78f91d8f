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
  found = cycles.cycles(hlo.parse(program()))
  assert found == cycles.Cycles(3 * 70, hlo_test.PRODUCT)
  assert found.seconds(100.0, hlo_test.PRODUCT) == 2.1 + 1


def test_an_estimate_of_a_fusion_has_its_product():
  text = program().replace(UNKNOWN, '"estimated_cycles":"5"')
  assert cycles.cycles(hlo.parse(text)) == cycles.Cycles(3 * 70 + 5, 0.0)


def test_a_program_without_estimates_has_no_cycles():
  text = program().replace('"estimated_cycles"', '"cycles"')
  assert cycles.cycles(hlo.parse(text)) is None
