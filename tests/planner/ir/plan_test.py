import dataclasses
import json

import pytest

from planner.ir import plan
import tiny

PLANS = {
  'one device': plan.one_place(['generate', 'apply']),
  'a mesh': plan.one_place(['generate'], tiny.PLACES['mixed'], {'generate': 4}),
  'no stages': plan.one_place([]),
  'places': plan.Plan(
    {'a': plan.Placement((0, 1), (('data', 2),)), 'b': plan.Placement((2,))},
    {'generate': 'a', 'gradient': 'b', 'apply': 'b'},
    {'gradient': 2},
  ),
  'processes': plan.one_place(
    ['apply'], plan.Placement((0, 1, 2, 3), (('data', 4),), processes=2)
  ),
  'shared devices': plan.Plan(
    {
      'a': plan.Placement((0, 1), (('data', 2),)),
      'b': plan.Placement((1,)),
      'c': plan.Placement((2,)),
    },
    {'generate': 'a', 'gradient': 'b', 'apply': 'c'},
    shared_devices=('b', 'a'),
  ),
  'compiler options': dataclasses.replace(
    plan.one_place(['generate']),
    compiler_options={'generate': {'xla_backend_optimization_level': 1}},
  ),
  'an order': dataclasses.replace(
    plan.one_place(['generate']), order=(1, (2, (1, (0, (0,)))), 0)
  ),
}


@pytest.mark.parametrize('original', PLANS.values(), ids=PLANS)
def test_a_plan_survives_json(original):
  assert plan.Plan.from_json(original.to_json()) == original


def test_a_plan_can_be_edited_as_json():
  data = json.loads(PLANS['a mesh'].to_json())
  data['micro_batch']['generate'] = 2
  data['places']['all']['axes'] = [['fsdp', 8]]
  edited = plan.Plan.from_json(json.dumps(data))
  assert edited.micro_batch == {'generate': 2}
  assert edited.places['all'] == tiny.PLACES['fsdp']


def test_one_place_holds_every_stage():
  collocated = plan.one_place(('act', 'learn'), micro_batch={'learn': 4})
  assert collocated.stages == {'act': 'all', 'learn': 'all'}
  assert list(collocated.places) == ['all']
  assert collocated.micro_batch == {'learn': 4}


def test_a_plan_cannot_be_changed_in_place():
  with pytest.raises(dataclasses.FrozenInstanceError):
    PLANS['one device'].stages = {}


def test_a_stage_on_an_unknown_place_is_refused():
  with pytest.raises(ValueError, match=r"apply .* 'b', .* one of \['a'\]"):
    plan.Plan({'a': plan.Placement()}, {'apply': 'b'})


def test_micro_batches_of_an_unknown_stage_are_refused():
  with pytest.raises(
    ValueError, match=r"micro-batch for 'gradeint', .*\['gradient'\]"
  ):
    plan.one_place(['gradient'], micro_batch={'gradeint': 4})


def test_several_devices_without_axes_are_refused():
  with pytest.raises(ValueError, match=r"4 devices needs .*\('data', 4\)"):
    plan.Placement((0, 1, 2, 3))


@pytest.mark.parametrize('devices', [(0, 1, 2), (0,), ()])
def test_axes_that_do_not_multiply_to_the_devices_are_refused(devices):
  with pytest.raises(ValueError, match='axes .* needs 4 devices, and it has'):
    plan.Placement(devices, (('data', 2), ('fsdp', 2)))


def test_a_place_without_devices_is_refused():
  with pytest.raises(ValueError, match='needs 1 devices, and it has 0'):
    plan.Placement(())


def test_a_device_named_twice_is_refused():
  with pytest.raises(ValueError, match='names a device twice'):
    plan.Placement((0, 0), (('data', 2),))


def test_negative_devices_are_refused():
  with pytest.raises(ValueError, match='has device -1: devices are numbered'):
    plan.parse({'places': {'a': {'devices': [-1]}, 'b': {'devices': [3]}}})


@pytest.mark.parametrize(
  'axes',
  [
    [['data', -2], ['fsdp', -1]],
    [['data', 0]],
    [['data', 2, 1]],
    [['data']],
    [[2, 'data']],
    [[7, 2]],
  ],
)
@pytest.mark.parametrize('devices', [[], [0, 1]])
def test_axes_are_names_with_sizes_of_one_or_more(axes, devices):
  with pytest.raises(ValueError, match='mesh axis .* of 1 or more'):
    plan.parse({'places': {'a': {'devices': devices, 'axes': axes}}})


def test_two_axes_of_one_name_are_refused():
  with pytest.raises(ValueError, match='two of one name'):
    plan.Placement((0, 1, 2, 3), (('data', 2), ('data', 2)))


@pytest.mark.parametrize('processes', [3, 8])
def test_processes_that_do_not_divide_the_devices_are_refused(processes):
  with pytest.raises(
    ValueError, match=f'{processes} processes cannot divide 4 devices evenly'
  ):
    plan.Placement((0, 1, 2, 3), (('data', 4),), processes)


def test_a_place_of_zero_processes_is_refused():
  with pytest.raises(ValueError, match='cannot be of 0 processes: give 1'):
    plan.Placement(processes=0)


def test_json_names_processes_only_where_there_are_several():
  for name, original in PLANS.items():
    assert ('processes' in original.to_json()) == (name == 'processes')


def test_a_place_is_described_by_devices_mesh_and_processes():
  assert str(plan.Placement()) == '1 device'
  two = plan.Placement((0, 1), (('data', 2),), processes=2)
  assert str(two) == '2 devices data=2 in 2 processes'


def test_a_device_of_two_places_is_refused():
  places = {
    'a': plan.Placement((0, 1), (('data', 2),)),
    'b': plan.Placement((1,)),
  }
  with pytest.raises(ValueError, match="Device 1 is in the places 'a' and 'b'"):
    plan.Plan(places, {})


def test_sharing_a_device_requires_naming_both_places():
  places = {'a': plan.Placement((3,)), 'b': plan.Placement((3,))}
  with pytest.raises(ValueError, match='name both places in `shared_devices`'):
    plan.Plan(places, {}, shared_devices=('a',))


@pytest.mark.parametrize('name', ['c', 'd'])
def test_a_sharing_place_without_a_shared_device_is_refused(name):
  places = {n: plan.Placement((int(n == 'c'),)) for n in 'abc'}
  with pytest.raises(ValueError, match=f'lets {name!r} share devices, and no'):
    plan.Plan(places, {}, shared_devices=('a', 'b', name))


def test_places_that_share_lease_all_their_devices_together():
  pair = (('data', 2),)
  devices = {'a': (0, 1), 'b': (1, 2), 'c': (2, 3), 'd': (4, 5), 'e': (4, 5)}
  places = {name: plan.Placement(at, pair) for name, at in devices.items()}
  shared = plan.Plan(
    places | {'f': plan.Placement((6,))}, {}, shared_devices=(*'ebcad',)
  )
  assert (
    shared.lease_devices('a')
    == shared.lease_devices('b')
    == shared.lease_devices('c')
    == (0, 1, 2, 3)
  )
  assert shared.lease_devices('d') == shared.lease_devices('e') == (4, 5)
  assert shared.lease_devices('f') == ()


def test_zero_pieces_are_refused():
  with pytest.raises(ValueError, match='pass in 0 pieces'):
    plan.Plan({'a': plan.Placement()}, {}, pieces=0)


def test_offloading_for_an_unknown_stage_is_refused():
  with pytest.raises(ValueError, match=r"offloading for 'aply'.*\['apply'\]"):
    plan.Plan({'a': plan.Placement()}, {'apply': 'a'}, offload=('aply',))


def test_compiler_options_of_the_other_stages():
  fast, own = {'xla_backend_optimization_level': 1}, {'xla_dump_to': 'hlo'}
  sketch = {'compiler_options': {'*': fast, 'apply': own}}
  parsed = plan.parse(sketch, ['generate', 'gradient', 'apply'])
  assert parsed.compiler_options == {
    'generate': fast,
    'gradient': fast,
    'apply': own,
  }


def test_compiler_options_of_an_unknown_stage_are_refused():
  with pytest.raises(ValueError, match="compiler options for 'gradeint'"):
    plan.parse({'compiler_options': {'gradeint': {}}}, ['gradient'])


def test_an_unknown_field_of_a_plan_is_refused():
  text = '{"places": {"a": {}}, "stages": {}, "peices": 2}'
  with pytest.raises(ValueError, match=r"no \['peices'\]: it has .*'pieces'"):
    plan.Plan.from_json(text)


def test_an_unknown_field_of_a_place_is_refused():
  place = {'devices': [0, 1], 'axes': [['data', 2]], 'proceses': 2}
  with pytest.raises(
    ValueError, match=r"place '.*' has no \['proceses'\]: it has"
  ):
    plan.parse({'places': {'a': place}})


def test_fields_missing_in_json_have_defaults():
  text = '{"places": {"a": {"devices": [3]}}, "stages": {"learn": "a"}}'
  parsed = plan.Plan.from_json(text)
  assert parsed == plan.Plan({'a': plan.Placement((3,))}, {'learn': 'a'})


def test_an_empty_sketch_runs_everything_on_one_device():
  assert plan.parse({}, ('act', 'learn')) == plan.one_place(('act', 'learn'))


def test_sketches_express_collocated_disaggregated_and_hybrid_plans():
  names = ('generate', 'reward', 'gradient', 'apply')
  two = {'actor': {'devices': [0]}, 'learner': {'devices': [1]}}
  collocated = plan.parse({'places': {'all': {'devices': [0]}}}, names)
  assert set(collocated.stages.values()) == {'all'}
  apart = plan.parse(
    {'places': two, 'stages': {'generate': 'actor', '*': 'learner'}}, names
  )
  assert apart.stages == dict.fromkeys(names, 'learner') | {'generate': 'actor'}
  hybrid = plan.parse(
    {
      'places': two,
      'stages': {'generate': 'actor', 'reward': 'actor', '*': 'learner'},
      'pieces': 4,
    },
    names,
  )
  assert hybrid.stages['reward'] == 'actor' and hybrid.pieces == 4


def test_a_sketch_that_places_an_unknown_stage_is_refused():
  with pytest.raises(ValueError, match=r"places \['genrate'\].*\['generate'\]"):
    plan.parse({'stages': {'genrate': 'all'}}, ('generate',))


def test_only_places_of_one_process_share_devices():
  places = {
    'a': plan.Placement((0, 1), (('data', 2),), processes=2),
    'b': plan.Placement((1,)),
  }
  with pytest.raises(
    ValueError, match="lets 'a' share devices, and it is of 2"
  ):
    plan.Plan(places, {}, shared_devices=('a', 'b'))


@pytest.mark.parametrize(
  ('sketch', 'message'),
  [
    (
      {'places': {'a': {'devices': '0'}}},
      "A place 'a' has devices '0': give a list of device numbers, such as "
      '[0, 1].',
    ),
    (
      {'places': {'a': {'devices': [0, 1], 'axes': ['data', 2]}}},
      "A place 'a' has axes ['data', 2]: give a list of pairs, such as "
      "[['data', 2]].",
    ),
    (
      {'places': ['a']},
      "A plan has places ['a']: give a dictionary of places, such as "
      "{'learner': {'devices': [0]}}.",
    ),
    (
      {'micro_batch': 8},
      'A plan has micro_batch 8: give a number of rows for each stage, such '
      "as {'gradient': 8}.",
    ),
    (
      {'micro_batch': {'gradient': '8'}},
      "A plan has micro_batch {'gradient': '8'}: give a number of rows for "
      "each stage, such as {'gradient': 8}.",
    ),
    (
      {'pieces': 'two'},
      "A plan has pieces 'two': give a whole number, such as 4.",
    ),
    (
      {'offload': 'apply'},
      "A plan has offload 'apply': give a list of stages, such as ['apply'].",
    ),
    (
      {'offload': [['apply']]},
      "A plan has offload [['apply']]: give a list of stages, such as "
      "['apply'].",
    ),
    (
      {'shared_devices': [3]},
      'A plan has shared_devices [3]: give a list of places, such as '
      "['actor', 'learner'].",
    ),
    (
      {'places': {'a': {'devices': [0, 1], 'axes': ['a2']}}},
      "A place 'a' has axes ['a2']: give a list of pairs, such as "
      "[['data', 2]].",
    ),
    (
      {'places': {'a': {'devices': [0, 1], 'axes': [['data', 2.9]]}}},
      "A place 'a' has axes [['data', 2.9]]: give a list of pairs, such as "
      "[['data', 2]].",
    ),
  ],
)
def test_values_of_other_types_are_refused(sketch, message):
  with pytest.raises(ValueError) as error:
    plan.parse(sketch, ['gradient', 'apply'])
  assert str(error.value) == message


@pytest.mark.parametrize(
  'order', [['a'], [None], [[1]], [1, [0, 'a']], [[1, 2]]]
)
def test_an_order_of_anything_but_numbers_and_pairs_is_refused(order):
  with pytest.raises(ValueError, match='The order of a plan has'):
    plan.parse({'order': order}, ['gradient'])


def test_every_field_has_a_type_that_is_checked():
  for types, kind in (
    (plan._PLAN_TYPES, plan.Plan),
    (plan._PLACE_TYPES, plan.Placement),
  ):
    assert [*types] == [field.name for field in dataclasses.fields(kind)]
