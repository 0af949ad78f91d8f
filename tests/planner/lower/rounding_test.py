"""Which values places hold rounded, and what that costs."""

import jax
import jax.numpy as jnp
import pytest

from planner.costs import cost_table
from planner.costs.mesh import call_memory, memory
from planner.costs.mesh import layout as layout_lib
from planner.costs.work import StageWork, Work
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from planner.lower import rounding, unroll
from sharding import rules
import stages
from tests.planner.costs import toy_costs

PARAMS = {'up_DF': jnp.ones((64, 256)), 'norm_D': jnp.ones(64)}
EMBED = jnp.ones((128, 64))
ROWS = jnp.ones((8, 64))
WIDE, NARROW = 4 * (64 * 256 + 64), 2 * 64 * 256 + 4 * 64  # Bytes.
TWO = {'a': plan_lib.Placement((0,)), 'b': plan_lib.Placement((1,))}


def half(params):
  return params | {'up_DF': params['up_DF'].astype('bfloat16')}


def reader(name, rounds=None):
  return stages.Stage(
    lambda params, x: x * params['norm_D'].sum(),
    name,
    unbatched=(0,),
    rounds={0: rounds} if rounds else {},
  )


act, score, judge = reader('act', half), reader('score', half), reader('judge')
to_float16 = reader(
  'other', lambda p: p | {'up_DF': p['up_DF'].astype('float16')}
)

decode = stages.Stage(
  lambda params, x: x * params['embed_VD'].sum(),
  'decode',
  unbatched=(0,),
  rounds={0: lambda p: jax.tree.map(lambda x: x.astype('bfloat16'), p)},
)


@stages.stage('learn', 'batch')
def learn(params, x):
  return jax.tree.map(lambda p: p + x.mean(), params)


def flow_of(*readers, step=None):
  """A step whose readers read the parameters before `learn` replaces them."""

  def plain(params, x):
    for stage in readers:
      x = stage(params, x)
    return learn(params, x), x

  return flow_lib.trace(step or plain, PARAMS, ROWS)


def held(flow, **where):
  """Names and types of what place b holds rounded, by value."""
  names = dict.fromkeys(flow.stages, 'a') | where
  found = rounding.held(flow, plan_lib.Plan(TWO, names))
  assert not found['a']
  return {
    flow.values[v].name: str(flow.values[w].dtype)
    for v, w in found['b'].items()
  }


ROUNDED = {'state.up_DF': 'bfloat16', 'learn.up_DF': 'bfloat16'}


def test_a_place_whose_stages_round_alike_holds_what_they_round():
  assert held(flow_of(act, score), act='b') == ROUNDED
  assert held(flow_of(act, score), act='b', score='b') == ROUNDED


@pytest.mark.parametrize('other', [judge, to_float16], ids=['as is', 'float16'])
def test_a_place_whose_stages_disagree_holds_values_as_they_are(other):
  flow = flow_of(act, other)
  assert held(flow, act='b') == ROUNDED
  assert held(flow, act='b', **{other.name: 'b'}) == {}


def test_a_place_that_trains_holds_parameters_as_they_are():
  assert held(flow_of(act), act='b', learn='b') == {}
  flow = flow_of(act, score)
  assert not any(rounding.held(flow, plan_lib.one_place(flow.stages)).values())


def test_evaluations_count_as_readers():
  step, where = flow_of(act), {'act': 'b', 'judge': 'b'}
  for reads, want in (judge, {}), (score, ROUNDED):
    evaluate = flow_lib.trace(
      lambda params, x, stage=reads: (params, stage(params, x)), PARAMS, ROWS
    )
    both = rounding.with_readers(step, evaluate)
    assert held(both, **where | {reads.name: 'b'}) == want
    assert held(both, **where | {reads.name: 'a'}) == ROUNDED


def test_what_no_step_changes_stays_as_it_is_where_checksums_are_taken():
  def step(params, x):
    return params, score(params, act(params, x))

  flow = flow_of(step=step)
  # The place of its first reader owns it.
  assert held(flow, score='b') == {'state.up_DF': 'bfloat16'}
  assert held(flow, act='b', score='b') == {}


def stale(params, x):
  """A step that acts by the parameters of the step before."""
  now, before = params
  return (learn(now, act(before, x)), now), x


def test_older_parameters_are_rounded_where_they_act_alone():
  state = PARAMS, PARAMS
  flow = flow_lib.trace(stale, state, ROWS)
  found = held(flow, act='b')
  assert found == {'state.1.up_DF': 'bfloat16', 'state.0.up_DF': 'bfloat16'}
  # Another flow would read of the place what it has rounded.
  evaluate = flow_lib.trace(
    lambda state, x: (state, judge(state[1], x)), state, ROWS
  )
  both = rounding.with_readers(flow, evaluate)
  assert held(both, act='b', judge='a') == {}


def test_what_a_place_hands_on_to_another_that_reads_it_stays_as_it_is():
  def step(state, x):
    now, before, oldest = state
    x = act(oldest, act(before, judge(oldest, x)))
    return (learn(now, x), now, before), x

  flow = flow_lib.trace(step, (PARAMS,) * 3, ROWS)
  # It alone holds `before`, of which the place of `judge` makes its `oldest`.
  assert held(flow, act='b') == {}


def test_what_evaluations_return_stays_as_it_is():
  state = PARAMS, PARAMS
  step = flow_lib.trace(stale, state, ROWS)
  assert held(step, act='b')
  evaluate = flow_lib.trace(lambda state, x: (state, state[1]), state, ROWS)
  assert held(rounding.with_readers(step, evaluate), act='b') == {}


def changed(params, x):
  """A loop that changes parameters, which one place samples with."""

  def body(carry):
    params, x = carry
    x = act(params, x)
    return (learn(params, x), x), None

  return stages.Repeat(body, 'updates', 2)((params, x))


def test_what_a_loop_has_made_is_rounded_where_no_stage_of_it_reads_it():
  def step(params, x):
    params, x = changed(params, score(params, x))
    return params, x

  flow = flow_of(step=step)
  for known in flow, unroll.unroll(flow):
    found = held(known, score='b')
    assert [*found.values()] == ['bfloat16'] * 2 and 'state.up_DF' in found
    assert held(known, act='b', score='b') == {}


def test_what_a_loop_has_made_stays_as_it_is_where_the_loop_reads_it():
  def step(params, x):
    made, x = changed(params, x)
    return learn(params, x), score(made, x)

  flow = flow_of(step=step)
  for known in flow, unroll.unroll(flow):
    # Their place has it from the loop.
    assert held(known, act='b', score='b') == {}
    assert [*held(known, score='b').values()] == ['bfloat16']


def test_the_planner_rounds_nothing_that_loops_carry():
  flow = flow_of(step=changed)
  (loop,) = flow.nodes
  plan = plan_lib.Plan(TWO, {'act': 'b', 'learn': 'a'})
  inner = rounding.in_body(flow, loop, plan, rounding.held(flow, plan))
  assert not inner['b']
  assert held(flow, act='b') == held(unroll.unroll(flow), act='b') == {}


def test_what_a_loop_carries_elsewhere_may_be_rounded_here():
  def step(params, x):
    x = score(params, x)
    _, x = changed(params, x)
    return learn(params, x), x

  flow = flow_of(step=step)
  where = {'act': 'a', 'score': 'b'}
  for known in flow, unroll.unroll(flow):
    assert [*held(known, **where).values()] == ['bfloat16'] * 2


def test_what_a_loop_starts_with_may_also_be_given_to_it():
  def step(params, x):
    def body(carry, first):
      params, x = carry
      x = score(first, x)
      return (learn(params, x), x), None

    return stages.Repeat(body, 'updates', 2)((params, x), params)

  flow = flow_of(step=step)
  for known in flow, unroll.unroll(flow):
    assert [*held(known, score='b').values()] == ['bfloat16'] * 2


def looped(params, x):
  def body(x, params):
    return act(params, x), None

  x = stages.Repeat(body, 'rounds', 3)(x, params)
  return learn(params, x), x


def test_a_loop_reads_what_the_stages_of_its_body_read():
  flow = flow_of(step=looped)
  assert held(flow, act='b') == ROUNDED
  assert held(unroll.unroll(flow), act='b') == ROUNDED
  (loop,) = (node for node in flow.nodes if node.body)
  plan = plan_lib.Plan(TWO, {'act': 'b', 'learn': 'a'})
  inner = rounding.in_body(flow, loop, plan, rounding.held(flow, plan))
  assert {str(loop.body.values[w].dtype) for w in inner['b'].values()} == {
    'bfloat16'
  }
  assert not inner['a']


def test_rounded_values_take_fewer_bytes_of_memory_and_of_links():
  flow, m = flow_of(act, score), toy_costs.model()
  found = {}
  for where in 'a', 'b':
    names = {'act': 'b', 'score': where, 'learn': 'a'}
    plan = plan_lib.Plan(TWO, names)
    peaks = memory.MemoryModel({}, layout_lib.Layout(rules.DEFAULT))
    _, parts = peaks.parts(flow, plan, 'b')
    found['memory', where] = parts['carried values'].value
  assert found['memory', 'a'] == found['memory', 'b'] == NARROW
  (v,) = (
    v
    for v, x in enumerate(flow.values)
    if x.name == 'learn.up_DF' and x.dtype == 'float32'
  )
  costs = cost_table.CostTable(m, plan)
  near = toy_costs.NEAR
  assert costs.transfer(flow, v, 'a', 'b') == pytest.approx(
    near.latency_seconds + 2 * 64 * 256 / near.bandwidth
  )
  assert costs.transfer(flow, v, 'b', 'a') == pytest.approx(
    near.latency_seconds + 4 * 64 * 256 / near.bandwidth
  )
  assert costs.switch(flow, v, 'b') == costs.switch(flow, v, 'a') / 2


@pytest.mark.parametrize(
  'platform, axes, made',
  [('gpu', (), 'layers'), ('tpu', (), ''), ('tpu', (('fsdp', 2),), 'both')],
)
def test_decoding_makes_no_copy_of_what_is_rounded(platform, axes, made):
  """But of layers that loops do not read in place, and of what is gathered."""
  params = {'layers': {'up_DF': jnp.ones((4, 64, 256))}, 'embed_VD': EMBED}
  flow = flow_lib.trace(
    lambda params, x: (learn(params, decode(params, x)), x), params, ROWS
  )
  work = StageWork(Work(turns=8.0, bytes_alive=1e6), Work(), 8)
  node = next(node for node in flow.nodes if node.name == 'decode')
  sizes = []
  for rounded in {}, dict(node.rounded):
    found = call_memory.within(
      flow,
      node,
      axes,
      plan_lib.Execution(),
      1,
      {'decode': work},
      layout_lib.Layout(rules.DEFAULT),
      platform,
      rounded,
    )
    sizes.append(found['activations'].value)
  ready = {'layers': 128 * 64, '': 128 * 64 + 4 * 64 * 256, 'both': 0}[made]
  assert sizes[0] - sizes[1] == 2 * ready


def test_rounding_may_only_change_types():
  bad = stages.Stage(
    lambda params, x: x, 'bad', unbatched=(0,), rounds={0: lambda p: p['up_DF']}
  )
  with pytest.raises(TypeError, match='may only change types'):
    flow_of(bad)
