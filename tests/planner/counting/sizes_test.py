"""The work at the numbers of rows that a plan asks for is that of a count."""

import dataclasses
import functools

import pytest

from planner import cluster
from planner.costs import roofline
from planner.costs import work as work_lib
from planner.counting import count
from planner.ir import plan as plan_lib
from sharding import rules
from stages import workflows
from stages.learn import optimizers
import tiny

COLUMNS = 58
# Queries of more than four rows attend in chunks, which are smaller for more.
TOKENS = COLUMNS + tiny.LENGTH
CHUNKED = 4 * tiny.CONFIG.H * TOKENS**2
GROUP = 4
STAGES = 'ref_logp', 'gradient'


@functools.cache
def flow(groups, max_live_scores=CHUNKED):
  config = dataclasses.replace(tiny.CONFIG, max_live_scores=max_live_scores)
  workflow = workflows.grpo(
    tiny.policy(config=config),
    tiny.even,
    optimizers.adamw(1e-3),
    group_size=GROUP,
    kl_coef=0.1,
  )
  return tiny.trace(workflow, tiny.problem(groups, COLUMNS))


def node_of(step, name):
  return next(node for node in step.nodes if node.name == name)


@functools.cache
def counted(name):
  """The work of a call with 512 rows, counted for 8, 64, 256 and 512."""
  step = flow(128)
  return count.of_node(step, node_of(step, name))


def exact(name, rows):
  """The work of a call with so many rows, by a program of its own."""
  node = node_of(flow(128), name)
  return count.work(node.stage.fn, *count._arguments(flow(128), node, rows))


@pytest.mark.parametrize('name', STAGES)
@pytest.mark.parametrize('rows', [4, 16, 100, 384])
def test_attention_in_chunks_is_charged_as_if_counted_at_that_size(name, rows):
  found, wanted = counted(name).near(rows).exactly(rows), exact(name, rows)
  for field in ('matmul_flops', 'flops', 'bytes_moved', 'kernels'):
    want = getattr(wanted, field)
    assert getattr(found, field) == pytest.approx(want, rel=0.01), field


def test_work_of_chunks_grows_faster_than_its_rows():
  """Each chunk reads all keys: what the other tests are about."""
  few, many = exact('ref_logp', 8), exact('ref_logp', 512)
  assert many.bytes_moved > 1.3 * 64 * few.bytes_moved
  assert many.kernels > 2 * few.kernels


def priced(groups, devices):
  """Seconds of the reference's log-probabilities, in a batch of groups."""
  step = flow(groups)
  node = node_of(step, 'ref_logp')
  works = dict.fromkeys(step.stages)
  works['ref_logp'] = count.of_node(step, node)
  device = cluster.Device('toy', {'float32': 1e12}, 1e11, 1e9, 1e11, 1e10)
  link = cluster.Link(1e-6, 1e10)
  there = cluster.Cluster(device, 128, 128, link, link)
  model = roofline.Roofline(step, works, there, rules.DEFAULT)
  axes = (('data', devices),) if devices > 1 else ()
  where = plan_lib.Placement(tuple(range(devices)), axes)
  return model.seconds(step, node, where, None)


@pytest.mark.parametrize('devices', [2, 16, 128])
def test_a_device_takes_as_long_as_one_alone_with_its_rows(devices):
  """Also where its rows are fewer than a 64th of the batch."""
  shared, alone = priced(128, devices), priced(128 // devices, 1)
  assert shared == pytest.approx(alone, rel=0.01)


def test_what_was_asked_before_changes_nothing():
  step, sizes = flow(128), (4, 16, 32, 128, 384)
  found = []
  for order in (sizes, sizes[::-1]):
    work = count.of_node(step, node_of(step, 'gradient'))
    some = {n: work.near(n).exactly(n) for n in order}
    found.append([some[n] for n in sizes])
  assert found[0] == found[1]


def test_a_line_is_not_counted_again(monkeypatch):
  traced, real = [], count._traced
  monkeypatch.setattr(
    count, '_traced', lambda *args: traced.append(args) or real(*args)
  )
  step = flow(32, max_live_scores=2**26)
  node = node_of(step, 'gradient')
  work = count.of_node(step, node)
  first = len(traced)
  for rows in (16, 32, 48, 64, 96, 128):
    found = work.near(rows).exactly(rows)
    assert found.flops == pytest.approx(work.at(rows).flops, rel=1e-6)
  assert len(traced) == first


def test_sizes_are_counted_where_none_lies_on_a_line():
  asked = []

  def counts(flops):
    def at(rows):
      asked.append(rows)
      return work_lib.Work(flops=flops(rows), kernels=rows)

    return work_lib.count_at_any_size(functools.cache(at), (1, 4, 16, 64))

  line = counts(lambda n: 3 + 2 * n)
  assert [line(n).flops for n in (1, 2, 8, 40, 64)] == [5, 7, 19, 83, 131]
  assert {*asked} == {1, 4, 16, 64}
  square = counts(lambda n: n * n)
  assert [square(n).flops for n in (1, 2, 8, 40, 80)] == [1, 4, 64, 1600, 6400]
  # Flat until 16, and a line from there.
  bent = counts(lambda n: 7 if n < 16 else 7 + n - 16)
  assert [bent(n).flops for n in (2, 8, 40)] == [7, 7, 31]
