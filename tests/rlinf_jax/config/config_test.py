"""Recipes run as written and from run folders; unused bindings are refused."""

import textwrap

import pytest
import safetensors

from fake_recipe import BASE, parse, refused, run, write
from rlinf_jax.config import config, config_errors, recipe_files

pytestmark = pytest.mark.usefixtures('recipe_folder')


def refused_as_unused():
  with pytest.raises(ValueError) as error:
    config.refuse_unused()
  return str(error.value)


# Reading.


def test_bindings_override_files_and_later_ones_earlier_ones():
  parse(
    'flows.grpo.clip_high = 0.3', 'STEPS = 7', 'flows.grpo.clip_high = 0.28'
  )
  grpo = 'grpo', ('adamw', 0.1, 0.0), 4, 0.28, None
  assert run() == (grpo, 'runs/x', 7, 0)
  assert config.unused() == []


def test_one_binding_is_read_without_the_others():
  from recipe_library import flows, loop

  # A call of `clumsy.area` would fail: it lacks arguments.
  parse(
    'from recipe_library import clumsy', 'loop.train.before = @clumsy.area()'
  )
  assert config.binding(loop.train, 'steps') == 5  # A macro.
  assert config.binding(loop.train, 'seed') is None
  assert config.binding(flows.sft, 'examples') is None
  with pytest.raises(ValueError):
    run()


def test_a_binding_may_use_imports_of_the_files():
  parse('OPTIMIZER = @optim.adam()', 'optim.adam.learning_rate = 0.5')
  assert run()[0][1] == ('adam', 0.5)
  assert config.unused() == ['optim.adamw.learning_rate']


def test_a_binding_may_import():
  parse(
    'from recipe_library import clumsy',
    'flows.grpo.loss = @clumsy.area',
    'loop.train.seed = 3',
  )
  assert run()[3] == 3


def test_bindings_see_the_imports_of_included_files_whatever_their_alias():
  write(
    'top.gin',
    """
    from __gin__ import dynamic_registration
    include 'base.gin'
    from recipe_library import optim as optimizers
    optimizers.adamw.decay = 0.5
    """,
  )
  parse('flows.grpo.clip_high = 0.28', files=['top.gin'])
  assert run()[0][1:4] == (('adamw', 0.1, 0.5), 4, 0.28)
  assert config.unused() == []


def test_parsing_replaces_the_earlier_configuration():
  parse('flows.grpo.clip_high = 0.28')
  parse()
  assert run()[0][3] == 0.2


def test_files_beside_the_package_are_found_from_any_folder(
  monkeypatch, capfd, tmp_path
):
  root = tmp_path / 'installed'
  (root / 'gin_configs').mkdir(parents=True)
  (root / 'gin_configs/other.gin').write_text(textwrap.dedent(BASE))
  (root / 'gin_configs/top.gin').write_text("include 'gin_configs/other.gin'")
  monkeypatch.setattr(recipe_files, 'ROOT', root)
  config._set_search.cache_clear()
  parse(files=['gin_configs/top.gin'])
  config._set_search.cache_clear()
  assert run()[2] == 5
  assert capfd.readouterr().err == ''


def test_workdir_is_a_macro():
  parse('flows.grpo.loss = %WORKDIR')
  assert run()[0][4] == 'runs/x'
  assert config.unused() == []


def test_workdir_need_not_be_read():
  parse()
  run()
  assert config.unused() == []


def test_a_binding_of_workdir_is_refused():
  assert '--workdir' in refused("WORKDIR = 'elsewhere'")


# Calling.


def test_a_recipe_without_a_root_is_one_sentence():
  config.parse([], [], 'runs/x')

  def never_mentioned():
    pass

  with pytest.raises(ValueError, match='Name a recipe with --gin_file'):
    config.call(never_mentioned)


def test_error_text_has_no_call_chain():
  parse('loop.train.before = @flows.grpo')
  with pytest.raises(TypeError) as error:
    run()
  assert 'In call to' in str(error.value)
  assert 'In call to' not in config_errors.text(error.value)


# Undefined macros.


def test_a_macro_that_is_read_must_be_set():
  assert refused('loop.train.steps = %STPES', 'A = [%SEED]') == (
    '`A` reads `%SEED`, which is not set; available: `A`, `OPTIMIZER`, '
    '`STEPS`, `WORKDIR`. '
    '`loop.train.steps` reads `%STPES`, which is not set; did you mean '
    '`STEPS`?'
  )


def test_required_parameters_are_named():
  text = refused('flows.grpo.clip_high = %gin.REQUIRED')
  assert 'add --gin.flows.grpo.clip_high=...' in text


# Unused bindings.


def test_a_misspelled_macro_is_refused():
  parse('STPES = 50')
  run()
  assert refused_as_unused() == (
    '`STPES` is set but nothing reads it; did you mean `STEPS`?'
  )


@pytest.mark.parametrize(
  ('name', 'end'),
  [
    ('Steps', '; did you mean `STEPS`?'),
    ('beta', '. --help after the recipe lists its settings.'),
  ],
)
def test_a_setting_of_another_program_has_a_remedy(name, end):
  parse(f'{name} = 50')
  run()
  assert refused_as_unused() == f'`{name}` is set but nothing reads it{end}'


def test_a_binding_of_an_unreferenced_function_is_refused():
  parse('optim.adam.learning_rate = 0.5')
  run()
  assert refused_as_unused() == (
    '`optim.adam.learning_rate` is set but nothing reads it; did you mean '
    '`optim.adamw.learning_rate`?'
  )


def test_a_binding_in_an_unused_scope_is_refused():
  parse('wram/flows.grpo.clip_high = 0.5')
  run()
  assert config.unused() == ['wram/flows.grpo.clip_high']


def test_a_binding_that_the_caller_overrides_is_refused():
  parse("loop.train.workdir = 'elsewhere'")
  assert run()[1] == 'runs/x'
  assert config.unused() == ['loop.train.workdir']


def test_a_binding_that_a_scope_always_overrides_is_refused():
  parse(
    'loop.train.workflow = @small/flows.grpo()',
    'small/flows.grpo.group_size = 2',
  )
  assert run()[0][2] == 2
  assert config.unused() == ['flows.grpo.group_size']


def test_every_unused_binding_is_named():
  parse('STPES = 50', 'flows.sft.examples = 3')
  run()
  text = refused_as_unused()
  assert '`STPES`' in text and '`flows.sft.examples`' in text


def test_a_macro_used_only_inside_a_macro_is_used():
  parse('STEPS = %LONG', 'LONG = %LONGER', 'LONGER = 900')
  assert run()[2] == 900
  assert config.unused() == []


def test_a_macro_used_only_inside_an_unused_macro_is_refused():
  parse('STPES = %LONG', 'LONG = 900')
  run()
  assert config.unused() == ['LONG', 'STPES']


WARM = (
  'loop.train.before = @warmup/loop.train',
  'warmup/loop.train.workflow = @flows.sft()',
  'warmup/loop.train.steps = %WARM_STEPS',
  'warmup/loop.train.before = None',
  'WARM_STEPS = 2',
  'warmup/flows.sft.optimizer = @gentle/optim.adamw()',
  'flows.sft.examples = 3',
  'gentle/optim.adamw.decay = 0.5',
)


@pytest.mark.parametrize('resume', [False, True])
def test_bindings_of_a_function_that_may_be_called_later_are_used(resume):
  parse(*WARM)
  run(resume=resume)
  assert config.unused() == []


@pytest.mark.parametrize('resume', [False, True])
def test_a_misspelled_scope_of_a_later_call_is_refused(resume):
  parse(*WARM, 'wramup/loop.train.steps = 2')
  run(resume=resume)
  assert refused_as_unused() == (
    '`wramup/loop.train.steps` is set but nothing reads it; did you mean '
    '`warmup/loop.train.steps`?'
  )


def test_a_function_in_a_macro_is_called_in_the_scope_of_its_reader():
  parse(
    *WARM,
    'LOSS = @flows.token_mean',
    'warmup/loop.train.workflow = @flows.grpo()',
    'warmup/flows.grpo.loss = %LOSS',
    'warmup/flows.token_mean.scale = 2.0',
    'flows.sft.optimizer = None',
  )
  run(resume=True)
  assert config.unused() == [
    'gentle/optim.adamw.decay',
    'flows.sft.examples',
    'flows.sft.optimizer',
    'warmup/flows.sft.optimizer',
  ]


def test_references_inside_containers_are_used():
  parse(
    "flows.grpo.loss = {'a': [(@flows.token_mean, %SCALE)]}",
    'flows.token_mean.scale = 3.0',
    'SCALE = 4.0',
  )
  run()
  assert config.unused() == []


# Writing.


def test_a_saved_config_runs_alone(recipe_folder):
  write(
    'top.gin',
    """
    from __gin__ import dynamic_registration
    include 'base.gin'
    from recipe_library import flows as f
    from recipe_library import optim as optimizers
    optimizers.adamw.decay = 0.5
    f.grpo.loss = %WORKDIR
    """,
  )
  parse(*WARM, 'loop.train.seed = 3', files=['top.gin'])
  expected = run()
  config.save('config.gin')
  for name in ('base.gin', 'top.gin'):
    (recipe_folder / name).unlink()

  config.parse(['config.gin'], [], 'runs/x')
  assert run() == expected
  assert config.unused() == []
  config.save('again.gin')
  assert (recipe_folder / 'again.gin').read_text() == (
    recipe_folder / 'config.gin'
  ).read_text()

  config.parse(['config.gin'], ['STEPS = 6'], 'runs/y')
  assert run()[0][4] == 'runs/y' and run()[2] == 6


def test_saved_dicts_keep_their_order(recipe_folder):
  """As the order of files to train on, which a resumed run compares."""
  files = {'z.jsonl': 3, 'a.jsonl': {'n': 1, 'b': 2}}
  parse(f'FILES = {files}', f'flows.grpo.loss = {files}')
  run()
  config.save('config.gin')
  config.save_operative('operative.gin')
  config.parse(['config.gin'], [], 'runs/x')
  loss = run()[0][4]
  assert [*loss] == ['z.jsonl', 'a.jsonl'] and [*loss['a.jsonl']] == ['n', 'b']
  for name in ('config.gin', 'operative.gin'):
    saved = (recipe_folder / name).read_text()
    assert saved.count(str(files)) == (2 if name == 'config.gin' else 1)


def test_the_operative_config_shows_what_was_read_with_defaults(recipe_folder):
  parse()
  run()
  config.save_operative('operative_config.gin')
  text = (recipe_folder / 'operative_config.gin').read_text()
  assert 'flows.grpo.clip_high = 0.2\n' in text
  assert 'optim.adamw.learning_rate = 0.1\n' in text


def test_saving_leaves_no_other_file(recipe_folder):
  parse()
  config.save('config.gin')
  assert {x.name for x in recipe_folder.iterdir()} == {'base.gin', 'config.gin'}


def test_a_failed_save_leaves_the_old_file(recipe_folder, monkeypatch):
  parse()
  (recipe_folder / 'config.gin').write_text('old')
  (recipe_folder / 'part_config.gin').mkdir()
  with pytest.raises(OSError):
    config.save('config.gin')
  assert (recipe_folder / 'config.gin').read_text() == 'old'


@pytest.mark.parametrize(
  ('error', 'text'),
  [
    (OSError(28, 'No space left on device'), 'No space left on device: mend'),
    (OSError(30, 'Read-only', '/x/y'), '/x/y cannot be used (Read-only): mend'),
    (OSError(21, 'A folder', 'p', 0, '/x'), '/x cannot be used (A folder): m'),
    (OSError('/x is a file: name another.'), '/x is a file: name another.'),
    (
      safetensors.SafetensorError('I/O error: Read-only file system'),
      'I/O error: Read-only file system: mend that, and continue with',
    ),
    (MemoryError(), 'The system refused memory to this process: free some'),
    (
      OverflowError('It is 9.'),
      'A number of the recipe or of its files is too large: It is 9.',
    ),
  ],
)
def test_errors_of_the_system_say_what_to_do(error, text):
  assert config_errors.text(error).startswith(text)
