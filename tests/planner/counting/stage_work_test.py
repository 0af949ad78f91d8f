"""Work of the stages of a flow: by rows, decoding, packing and plumbing."""

import pytest

from planner.costs import work as work_lib
from planner.counting import count
from planner.lower import cut
from stages import workflows
from stages.language.decoding import parts
from stages.learn import optimizers
import tiny


@pytest.fixture(scope='module')
def flow():
  workflow = workflows.grpo(
    tiny.policy(), tiny.even_on_host, optimizers.adamw(1e-3), group_size=4
  )
  return tiny.trace(workflow, tiny.problem(8))


@pytest.fixture(scope='module')
def works(flow):
  return count.of_flow(flow)


def test_every_stage_of_a_flow_is_counted(flow, works):
  assert tuple(works) == flow.stages
  assert works['reward'] is None  # The host's.
  assert works['gradient'].rows == 32
  assert works['apply'].rows == 0


def test_work_of_a_stage_is_linear_in_its_rows(flow, works):
  whole = flow.nodes[[n.name for n in flow.nodes].index('gradient')]
  assert works['gradient'].full_batch.matmul_flops > 0
  in_pieces = cut.cut(flow, 4)
  node = next(n for n in in_pieces.nodes if n.name == 'gradient')
  piece = count.of_node(in_pieces, node)
  assert piece.rows == 8
  for field in ('matmul_flops', 'bytes_moved', 'bytes_alive'):
    want = getattr(piece.full_batch, field)
    got = getattr(works['gradient'].at(8), field)
    assert got == pytest.approx(want, rel=0.05), field
  assert count.of_node(flow, whole) == works['gradient']


def test_decoding_reads_its_parameters_at_every_token(flow, works):
  node = next(n for n in flow.nodes if n.name == 'generate')
  params = sum(
    flow.values[v].bytes
    for v in node.reads
    if flow.values[v].name.startswith('state.actor.params')
  )
  fixed = works['generate'].fixed.bytes_moved
  assert fixed > 0.8 * tiny.LENGTH * params


def test_nodes_that_a_planner_adds_count_bytes_alone(flow):
  in_pieces = cut.cut(flow, 2)
  node = next(n for n in in_pieces.nodes if n.name == 'total')
  done = count.of_node(in_pieces, node).full_batch
  assert done.flops == 0 and done.bytes_moved == 1.5 * done.bytes_in


def test_work_is_exact_at_counted_rows_and_linear_between():
  done = [(n, work_lib.Work(flops=f)) for n, f in ((2, 5), (4, 7), (16, 23))]
  call = work_lib.piecewise_linear(done)
  assert [call.at(n).flops for n in (2, 4, 16)] == [5, 7, 23]
  assert [call.at(n).flops for n in (1, 3, 8)] == pytest.approx([4, 6, 37 / 3])
  assert call.rows == 16 and call.near(3).fixed.flops == 3
  steep = work_lib.piecewise_linear([*done, (32, work_lib.Work(flops=64))])
  assert steep.fixed.flops == 0 and steep.at(24).flops == 48
  assert work_lib.piecewise_linear(done[:1]).at(2) == done[0][1]


@pytest.mark.parametrize('rows', [(), (4, 4), (4, 2)])
def test_rows_that_do_not_increase_are_refused(rows):
  with pytest.raises(ValueError, match='rising numbers'):
    work_lib.piecewise_linear([(n, work_lib.NONE) for n in rows])


def test_parts_of_completions_have_their_tokens_and_read_fewer_columns(
  monkeypatch,
):
  def work():
    workflow = workflows.grpo(
      tiny.policy(), tiny.even, optimizers.adamw(1e-3), group_size=4
    )
    flow = tiny.trace(workflow, tiny.problem(8))
    return count.of_flow(flow)['generate'].full_batch

  whole = work()
  half = tiny.LENGTH // 2
  monkeypatch.setattr(parts, 'part_columns', lambda T: (half, T - half))
  in_parts = work()
  assert in_parts.turns == whole.turns == tiny.LENGTH
  assert in_parts.bytes_moved < whole.bytes_moved
  assert in_parts.matmul_flops < whole.matmul_flops
  # The same columns are held, and all layers compute each token once.
  assert in_parts.bytes_alive == pytest.approx(whole.bytes_alive, rel=0.05)


@pytest.mark.parametrize('groups', [4, 1])
def test_packed_rows_that_a_loop_may_leave_out_are_not_tokens_of_a_row(groups):
  policy = tiny.policy(packed_tokens=14)
  workflow = workflows.grpo(
    policy, tiny.even, optimizers.adamw(1e-3), group_size=4, kl_coef=0.1
  )
  works = count.of_flow(tiny.trace(workflow, tiny.problem(groups)))
  tokens = {name: work.full_batch.turns for name, work in works.items()}
  assert tokens.pop('generate') == tiny.LENGTH
  assert not any(tokens.values())
  # A packed row has room for one prompt and completion.
  passes = {name: work.full_batch.passes for name, work in works.items()}
  assert passes['ref_logp'] == passes['gradient'] == 4 * groups
  assert not passes['generate']
  assert works['gradient'].full_batch.matmul_flops > 0
