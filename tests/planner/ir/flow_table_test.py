"""A recording is listed call by call, with shapes and bytes."""

import re

import jax
import jax.numpy as jnp

from planner import formatting
import stages
from tests.planner.ir import flow_test
import tiny

LISTING = """\
3 stage calls; a state of 2 arrays, 52 B

stage   grain  reads from         makes                            bytes
double  row    input              float32[8,2]                     64 B
pair    row    input, double      y float32[8,2], z 2× float32[8]  128 B
update  batch  state.v, state.w,  v float32[5,2], w float32[3]     52 B
               double
"""


def test_a_listing_shows_stage_grain_sources_shapes_and_bytes():
  pair = stages.Stage(lambda x, y: {'y': x, 'z': (y[:, 0], y[:, 1])}, 'pair')
  update = stages.Stage(lambda state, x: state, 'update', 'batch')

  def step(state, x):
    twice = flow_test.double(x)
    both = pair(x, twice)
    return update(state, twice), both

  state = {'w': jnp.zeros(3), 'v': jnp.zeros((5, 2))}
  assert str(flow_test.trace(step, state)) == LISTING.rstrip()


def test_a_listing_counts_omitted_values():
  many = stages.Stage(
    lambda x: (
      {'a': (x, x[0]), 'b': [x[0]] * 2} | dict.fromkeys('cdef', x[0, 0])
    ),
    'many',
    'batch',
  )
  listing = str(flow_test.trace(lambda state, x: (state, many(x)))).split(
    '\n', 3
  )[3]
  assert ' '.join(listing.split()) == (
    'many batch input a (2 arrays), b 2× float32[2], c float32[], 104 B '
    'd float32[], and 2 smaller'
  )


def test_a_listing_shows_repeated_calls_once():
  half = stages.Stage(lambda x: x / 2, 'half')

  def step(state, x):
    for _ in range(6):
      x = half(flow_test.double(x))
    return state, x

  head, *lines = str(flow_test.trace(step)).splitlines()
  assert head.startswith('12 stage calls')
  # The first `double` reads the input, all others `half`.
  shown = [line.split()[0] for line in lines[2:]]
  assert shown == [
    'double',
    'half',
    'double',
    '(the',
    'half',
  ]
  assert lines[-2] == '(the last 2 calls: 5 times in all)'


def test_a_listing_of_grpo_fits_a_page():
  lines = str(
    tiny.trace(flow_test.grpo(kl_coef=0.1, num_minibatches=2), tiny.problem())
  ).splitlines()
  assert max(map(len, lines)) <= 100
  assert len(lines) <= 40


def test_a_listing_counts_all_bytes():
  graph = tiny.trace(flow_test.grpo(kl_coef=0.1), tiny.problem())
  params = jax.eval_shape(tiny.policy().init, jax.random.key(0))
  size = sum(x.size * 4 for x in jax.tree.leaves(params))
  carried = sum(graph.values[start].bytes for start, _ in graph.carry)
  assert carried == 2 * size + 4  # Actor, reference and the number of steps.
  (line,) = re.findall('^gradient.*', str(graph), re.M)
  assert line.endswith(formatting.byte_size(sum(
    graph.values[v].bytes
    for node in graph.nodes if node.name == 'gradient' for v in node.writes
  )))  # fmt: skip
