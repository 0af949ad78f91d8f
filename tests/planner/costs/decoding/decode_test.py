"""Decoding takes as long as its rows, not as long as rows may be."""

import dataclasses
import math

import numpy as np
import pytest

from planner.costs import roofline
from planner.costs.decoding import completions, contexts, decode, ends
from planner.costs.work import NONE, StageWork, Work
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import cut
from tests.planner.costs import toy_costs as toys

# Bytes of keys and values; a step of 1 ms and 0.1 ms a row, of traffic alone.
STEP = StageWork(Work(bytes_moved=1e8), Work(bytes_moved=1e7))
LENGTHS = np.array([2] * 16 + [4] * 8 + [8] * 7 + [100])
SPOT = plan_lib.Placement()


def explained(pieces=1, **kwargs):
  """The seconds of `act` in each piece, if it decodes."""
  known = {'lengths': LENGTHS, 'known': 'measured'}
  some = decode.DecodeWork(step=STEP, **known | kwargs)
  works = toys.WORKS | {'act': some}
  model = roofline.Roofline(
    toys.toy_flow(), works, toys.TOYS, toys.rules.DEFAULT, assumed=toys.SURE
  )
  flow = cut.cut(toys.toy_flow(), pieces)
  calls = [n for n in flow.nodes if n.name == 'act']
  return [model.explain(flow, n, SPOT) for n in calls], model


def seconds(pieces=1, **kwargs):
  return [found.total.value for found in explained(pieces, **kwargs)[0]]


def test_an_engine_ends_with_its_longest_row():
  (spent,) = seconds(engine=True)
  longest = ends.longest(LENGTHS, 32)
  done = completions.finish(
    np.sort([*LENGTHS[:-1], max(100, round(longest))]),
    lambda batch, _: 1e-3 + 1e-4 * batch,
  )
  assert spent == pytest.approx(done.max())
  assert spent < 100 * (1e-3 + 32 * 1e-4)  # As if all were as long.


def test_seconds_of_an_engines_pieces_add_up_and_the_last_has_the_tail():
  (whole,), parts = seconds(engine=True), seconds(4, engine=True)
  assert sum(parts) == pytest.approx(whole)
  assert parts[0] > 0 and parts[-1] > 0.8 * whole


def test_larger_groups_delay_the_first_piece():
  alone, groups = seconds(4, engine=True), seconds(4, engine=True, group_size=8)
  assert sum(alone) == pytest.approx(sum(groups))
  assert groups[0] > alone[0]


def test_an_engine_of_its_own_passes_a_piece_on_with_its_last_own_row():
  # A row of each group of four is long, so a piece without one is rare.
  lengths = [10, 10, 10, 90]
  (whole,), parts = (
    seconds(n, engine=True, is_separate=True, lengths=lengths) for n in (1, 4)
  )
  assert parts[0] > 0.85 * whole
  assert sum(parts) == pytest.approx(whole, rel=0.05)
  assert seconds(4, engine=True, lengths=lengths)[0] < 0.3 * whole


def test_an_engine_of_its_own_starts_the_rows_of_the_first_piece_first():
  one, *others = seconds(
    4, engine=True, is_separate=True, lengths=[50], max_rows=8
  )
  assert others == pytest.approx([one] * 3, rel=0.05)


def test_a_loop_decodes_every_piece_to_its_end():
  parts = seconds(4)
  assert len(set(parts)) == 1
  last = ends.longest(LENGTHS, 8)
  assert parts[0] == pytest.approx(last * (1e-3 + 8 * 1e-4))


def test_expected_longest_length_equals_that_of_random_draws():
  draws = np.random.default_rng(0).choice(LENGTHS, (20_000, 8)).max(1)
  error = draws.std() / len(draws) ** 0.5
  assert ends.longest(LENGTHS, 8) == pytest.approx(draws.mean(), abs=5 * error)
  assert ends.longest(LENGTHS, 1) == pytest.approx(LENGTHS.mean())


def test_an_engine_decodes_as_many_rows_at_once_as_fit_in_memory():
  free, tight = (
    seconds(engine=True, kept=1e6, budget=rows * 1e6)[0] for rows in (32, 4)
  )
  assert tight > free
  flow = toys.toy_flow()
  chosen = plan_lib.one_place(flow.stages, SPOT)
  _, model = explained(engine=True, kept=1e8, budget=4e8)
  need = model.explain_memory(flow, chosen, 'all')
  assert need[
    'keys and values of active rows, during act'
  ].value == pytest.approx(4e8)


def test_an_engine_takes_over_what_an_update_changes_alone():
  """Frozen weights beside an adapter are sent once, before the first step."""
  step = StageWork(Work(matmul={'bfloat16': 1.0}, bytes_moved=1e8))
  engine = decode.DecodeWork(LENGTHS, step, engine=True, is_separate=True)
  whole = toys.toy_flow()
  act, adapter = whole.nodes[0], whole.values[1]
  act = dataclasses.replace(act, reads=(0, 1, 2))
  frozen = dataclasses.replace(
    whole, nodes=(act, *whole.nodes[1:]), carry=((0, 0), (1, 6))
  )
  trained = dataclasses.replace(frozen, carry=whole.carry)

  def spent(flow, calls=1):
    once = dataclasses.replace(engine, calls=calls)
    model = roofline.Roofline(
      flow, toys.WORKS | {'act': once}, toys.TOYS, toys.rules.DEFAULT
    )
    return model.explain(flow, act, SPOT)['parameters, launch'].value

  size = 2 * math.prod(adapter.shape)  # In bfloat16.
  device = toys.TOYS.device
  # Through a file, which is written and read; the rest is the same.
  rest = spent(frozen) - 2 * size / device.host_bandwidth
  assert rest >= 0
  assert spent(trained) == pytest.approx(
    rest + 2 * 2 * size / device.memory_bandwidth
  )
  # In a loop of four rounds, the first takes them over.
  assert spent(trained, calls=4) == pytest.approx(
    rest + 2 * 2 * size / device.memory_bandwidth / 4
  )


def test_a_longer_context_costs_more():
  near = seconds(engine=True)
  reads = contexts.ColumnReads(Work(bytes_moved=1e6))
  far = seconds(engine=True, attention=[reads], context=50)
  assert far[0] > near[0]


def slotted(lengths, slots, **reads):
  """Columns that slots read, in steps of which nothing else takes time."""
  second = Work(bytes_moved=toys.TOYS.device.memory_bandwidth)
  read = contexts.ColumnReads(second, **reads)
  some = decode.DecodeWork(
    lengths,
    StageWork(NONE),
    attention=[read],
    context=2.0,
    max_rows=slots,
    known='measured',
  )
  model = roofline.Roofline(
    toys.toy_flow(),
    toys.WORKS | {'act': some},
    toys.TOYS,
    toys.rules.DEFAULT,
    assumed=toys.SURE,
  )
  found = model.explain(toys.toy_flow(), toys.node('act'), SPOT)
  return found['steps until rows end'].value


def test_slots_read_the_columns_of_their_rows():
  """All 32 rows at once: each token has a column more."""
  columns = 2 + 3 + 4
  assert slotted([3], 32) == pytest.approx(32 * columns)
  assert slotted([3], 32, most=3.0) == pytest.approx(32 * (2 + 3 + 3))
  # Eight at a time.
  assert slotted([3], 8) == pytest.approx(32 * columns)
  of = {'of': 'longest'}
  assert slotted([3], 8, **of) == pytest.approx(32 * columns)
  assert slotted([3], 8, window=2.0, **of) == pytest.approx(32 * 3 * 2)


def test_empty_slots_read_as_much_as_the_longest_row_or_nothing():
  lengths = 31 * [1] + [5]
  # A step with two columns of all rows, and four of the row that is left, for
  # which eight slots stay.
  columns = 3 + 4 + 5 + 6
  assert slotted(lengths, 32) == pytest.approx(32 * 2 + columns)
  longest = slotted(lengths, 32, of='longest')
  assert longest == pytest.approx(32 * 2 + 8 * columns)


def test_rows_that_are_decoded_at_once_have_no_attention_of_their_own():
  reads = contexts.ColumnReads(Work(bytes_moved=1e6))
  with pytest.raises(ValueError, match='counts its attention in `step`'):
    decode.DecodeWork(LENGTHS, STEP, attention=[reads])


def test_costs_of_assumed_lengths_are_tagged_assumed():
  for known, tag in (('assumed', 'assumed'), ('measured', 'modeled')):
    (found,), _ = explained(engine=True, known=known)
    assert found.total.tag == tag
    parts = sum(number.value for number in found.values())
    assert found.total.value == pytest.approx(parts)


def test_a_counted_loop_ends_at_the_longest_length():
  counted = StageWork(
    Work(bytes_moved=1e9, turns=100), Work(bytes_moved=1e8), 32
  )
  some = decode.with_lengths(counted, 16 * [10, 20])
  works = toys.WORKS | {'act': some}
  flow = toys.toy_flow()
  model = roofline.Roofline(
    flow, works, toys.TOYS, toys.rules.DEFAULT, assumed=toys.SURE
  )
  full = roofline.Roofline(
    flow,
    toys.WORKS | {'act': counted},
    toys.TOYS,
    toys.rules.DEFAULT,
    assumed=toys.SURE,
  )
  ends = model.seconds(flow, toys.node('act'), SPOT, None)
  whole = full.seconds(flow, toys.node('act'), SPOT, None)
  assert ends == pytest.approx(whole * 20 / 100, rel=1e-6)


def test_lengths_beyond_the_counted_loop_are_refused():
  with pytest.raises(ValueError, match='no loop that may end early'):
    decode.with_lengths(StageWork(Work()), [1, 2])
  with pytest.raises(ValueError, match='up to 9 tokens, .* room for 8'):
    decode.with_lengths(StageWork(Work(turns=8)), [1, 9])


def test_zero_lengths_are_refused():
  with pytest.raises(ValueError, match='at least one of each'):
    decode.DecodeWork([0, 1], STEP)


def test_more_devices_do_not_shorten_the_longest_row():
  (one,), model = explained(engine=True)
  flow = toys.toy_flow()
  four = model.explain(flow, toys.node('act'), toys.spot(('data', 4)))
  tail = ends.longest(LENGTHS, 32) * 1e-3
  assert tail <= four.total.value < one.total.value


@pytest.mark.parametrize('rows', [4, 5, 31, 32])
def test_an_engine_s_fullest_copy_has_the_rows_that_are_left(rows):
  """Of four copies with one slot each."""
  engine = decode.DecodeWork([100], STEP, engine=True, max_rows=1)
  values = [
    toys.value(*x)
    for x in (
      ('p_DF', (64, 256), ('D', 'F')),
      ('x', (rows, 8), ('B', '')),
      ('y', (rows, 8), ('B', '')),
    )
  ]
  node = graph.Node(toys.Stage('gen'), (0, 1), (2,), frozenset({1}))
  flow = graph.Flow((node,), tuple(values), (0, 1), (2,), ())
  _, model = explained()
  spent = [
    engine.seconds(model, flow, node, toys.spot(*axes), rows)
    for axes in ((), (('data', 4),))
  ]
  one, four = (x['steps until rows end'].value for x in spent)
  assert four / one == pytest.approx(math.ceil(rows / 4) / rows, rel=1e-6)
