"""Values that no recipe can mean are refused when the recipe is read."""

import collections.abc
import functools
import pathlib
import re
import typing

import pytest

from rlinf_jax.config import (
  config,
  config_bindings,
  config_parameters,
  config_types,
)
from stages import ranges
from stages.learn import optimizers, signatures

SUMS = 'gin_configs/grpo_arithmetic.gin'
PUSH = 'gin_configs/ppo_push.gin'
LIBERO = 'gin_configs/grpo_libero.gin'
META_WORLD = 'gin_configs/ppo_metaworld_reach.gin'
CART_POLE = 'gin_configs/ppo_cartpole.gin'
OFT = 'gin_configs/grpo_openvla_oft_libero.gin'
QUESTIONS = 'gin_configs/grpo_math.gin'
ROOT = pathlib.Path(__file__).parents[2]
GIVEN = ('MODEL = "/model"', 'TRAIN = "/train"', 'EVAL = "/eval"')

# A recipe, a binding, and the message after the place of the binding.
WRONG = [
  (
    OFT,
    'FROZEN = ("vision")',
    "`FROZEN = 'vision'`, which `openvla_oft_env.pretrained.frozen` reads, "
    "must be a tuple, (x,) or (x, y), of one of 'vision', 'projector', "
    "'language'.",
  ),
  (
    SUMS,
    'STEPS = "ten"',
    "`STEPS = 'ten'`, which `optimizers.adamw.decay_steps` reads, must be a "
    'whole number of at least 0 or None.',
  ),
  (
    SUMS,
    'optimizers.adamw.learning_rate = "5e-4"',
    "`optimizers.adamw.learning_rate = '5e-4'` must be a number of at least "
    '0: leave out the quotes, 5e-4.',
  ),
  (
    SUMS,
    'arithmetic.problems.batch_size = "many"',
    "`arithmetic.problems.batch_size = 'many'` must be a whole number of at "
    'least 1.',
  ),
  (
    SUMS,
    'LENGTH = 0',
    '`LENGTH = 0`, which `arithmetic.examples.response_length` reads, must be '
    'a whole number of at least 1.',
  ),
  (
    SUMS,
    'GROUP = 0',
    '`GROUP = 0`, which `workflows.grpo.group_size` reads, must be a whole '
    'number of at least 1.',
  ),
  (
    SUMS,
    'STEPS = -3',
    '`STEPS = -3`, which `optimizers.adamw.decay_steps` reads, must be a '
    'whole number of at least 0 or None.',
  ),
  (
    SUMS,
    'train.train.evaluate_every = -1',
    '`train.train.evaluate_every = -1` must be a whole number of at least 0.',
  ),
  (
    SUMS,
    'train.train.plan = ["actor"]',
    "`train.train.plan = ['actor']` must be a dictionary or a text in quotes "
    'or None.',
  ),
  (
    SUMS,
    'SEED = True',
    '`SEED = True`, which `warm_start.checkpoint.seed` reads, must be a whole '
    'number of at least 0.',
  ),
  (
    SUMS,
    'workflows.grpo.minibatch_by = "rows"',
    "`workflows.grpo.minibatch_by = 'rows'` must be one of 'row', 'shuffled', "
    "'arrival'; did you mean 'row'?",
  ),
  (
    SUMS,
    'workflows.grpo.advantage = 3',
    '`workflows.grpo.advantage = 3` must be a function (@name).',
  ),
  (
    SUMS,
    'optimizers.adamw.b2 = 1.0',
    '`optimizers.adamw.b2 = 1.0` must be a number of at least 0 and below 1.',
  ),
  (
    SUMS,
    'optimizers.adamw.learning_rate = @optimizers.adamw',
    '`optimizers.adamw.learning_rate = @adamw` must be a number of at least 0: '
    'to call the function, add () to its name.',
  ),
  (
    SUMS,
    'train.train.source = "train.jsonl"',
    "`train.train.source = 'train.jsonl'` must be a Source, which a function "
    'returns (@name()).',
  ),
  (
    SUMS,
    'STEPS = "inf"',
    "`STEPS = 'inf'`, which `optimizers.adamw.decay_steps` reads, must be a "
    'whole number of at least 0 or None.',
  ),
  (
    SUMS,
    'STEPS = "nan"',
    "`STEPS = 'nan'`, which `optimizers.adamw.decay_steps` reads, must be a "
    'whole number of at least 0 or None.',
  ),
  (
    SUMS,
    'STEPS = 1e400',
    '`STEPS` is too large for a number: give at most 1e308.',
  ),
  (
    SUMS,
    'STEPS = "1e3"',
    "`STEPS = '1e3'`, which `optimizers.adamw.decay_steps` reads, must be a "
    'whole number of at least 0 or None: leave out the quotes, 1000.',
  ),
  (
    SUMS,
    'GROUP = 8.0',
    '`GROUP = 8.0`, which `workflows.grpo.group_size` reads, must be a whole '
    'number of at least 1: write 8.',
  ),
  (
    PUSH,
    'train.train.pretrain = @push.push',
    '`train.train.pretrain = @push` must be a function (@name) or None, and '
    '`push` takes no `seed`.',
  ),
  (
    PUSH,
    'train.train.export = @push.push',
    '`train.train.export = @push` must be a function (@name) or None, and '
    '`push` takes no `folder` and no `params`.',
  ),
  (
    SUMS,
    'warm_start.warm_up.train = @optimizers.adamw',
    '`warm_start.warm_up.train = @adamw` must be a function (@name), and '
    '`adamw` takes no `workdir` and no `seed` and no `resume`.',
  ),
  (
    QUESTIONS,
    'BATCH = "8"',
    "`BATCH = '8'`, which `questions.questions.batch_size` reads, must be a "
    'whole number of at least 1: leave out the quotes, 8.',
  ),
  # Settings that a function passes on to a simulator, or to the pool of it.
  (
    LIBERO,
    'libero.env.horizon = -1',
    '`libero.env.horizon = -1` must be a whole number of at least 1.',
  ),
  (
    LIBERO,
    'libero.env.horzon = 3',
    '`rlinf_jax.envs.libero.env` has no parameter `horzon`; did you mean '
    '`horizon`?',
  ),
  (
    LIBERO,
    'libero.env.chunk = 0',
    '`libero.env.chunk = 0` must be a whole number of at least 1.',
  ),
  (
    META_WORLD,
    'metaworld.env.terminate = 3',
    '`metaworld.env.terminate = 3` must be True or False.',
  ),
  (
    OFT,
    'openvla_oft_env.pretrained.critc = False',
    '`stages.vla.openvla.openvla_oft_env.pretrained` has no parameter '
    '`critc`; did you mean `critic`?',
  ),
  (
    OFT,
    'openvla_oft_env.pretrained.center_crop = 0.9',
    '`openvla_oft_env.pretrained.center_crop = 0.9` must be True or False.',
  ),
  (
    CART_POLE,
    'gymnasium.env.step_timeout = "long"',
    "`gymnasium.env.step_timeout = 'long'` must be a number.",
  ),
]


@pytest.fixture(autouse=True)
def _in_root(monkeypatch):
  monkeypatch.chdir(ROOT)


def refusal(recipe, binding, given=()):
  """The message for a binding, which must be refused."""
  with pytest.raises(ValueError) as error:
    config.parse([recipe], [*given, binding], '/runs/x')
  return str(error.value)


@pytest.mark.parametrize(('recipe', 'binding', 'message'), WRONG)
def test_a_wrong_value_is_refused_in_one_sentence(recipe, binding, message):
  given = GIVEN if recipe in (QUESTIONS, OFT) else ()
  assert refusal(recipe, binding, given) == (
    f"--gin_bindings '{binding}': {message}"
  )


CYCLES = [
  (('STEPS = %STEPS',), '`STEPS` reads itself: give it'),
  (
    ('STEPS = %GROUP', 'GROUP = %STEPS'),
    '`GROUP` reads `STEPS`, which reads `GROUP`: give one of them',
  ),
  (
    ('STEPS = [1, {2: %GROUP}]', 'GROUP = (%LENGTH,)', 'LENGTH = %STEPS'),
    '`GROUP` reads `LENGTH`, which reads `STEPS`, which reads `GROUP`: give '
    'one of them',
  ),
  (
    ('workflows.grpo.optimizer = @workflows.grpo()',),
    '`@stages.workflows.grpo()` reads itself: give it',
  ),
  (
    ('STEPS = @optimizers.adamw()', 'optimizers.adamw.b2 = %STEPS'),
    '`STEPS` reads `@stages.learn.optimizers.adamw()`, which reads `STEPS`: '
    'give one of them',
  ),
]


@pytest.mark.parametrize(('bindings', 'cycle'), CYCLES)
def test_a_value_that_is_computed_from_itself_is_refused(bindings, cycle):
  *given, last = bindings
  assert refusal(SUMS, last, given) == f'{cycle} a value of its own.'


class _Nameless:
  def __call__(self, reward_G):
    return reward_G


@pytest.mark.parametrize('function', [functools.partial(max, 1), _Nameless()])
def test_functions_without_a_name_are_functions(function):
  for annotation in vars(signatures).values():
    if typing.get_origin(annotation) is collections.abc.Callable:
      assert config_types.accepts(annotation, function)
      assert config_types.described(annotation) == 'a function (@name)'
  assert config_types._shown(function) == repr(function)


def test_a_number_or_a_function_is_both():
  assert config_types.accepts(signatures.Lambda, _Nameless())
  assert config_types.described(signatures.Lambda) == (
    'a number or a function (@name)'
  )


def test_a_long_value_is_cut_in_its_message():
  assert len(config_types._shown('x' * 10**6)) < 300


def test_a_value_of_a_file_is_refused_with_its_line(tmp_path):
  (tmp_path / 'mine.gin').write_text(
    f"include '{SUMS}'\n\n# Too few.\nGROUP = 0\n"
  )
  message = refusal(str(tmp_path / 'mine.gin'), 'STEPS = 3')
  assert message.startswith(f'{tmp_path}/mine.gin line 4: `GROUP = 0`, which')


def test_every_wrong_value_has_its_own_sentence():
  with pytest.raises(ValueError) as error:
    config.parse([SUMS], ['GROUP = 0', 'STEPS = "ten"'], '/runs/x')
  assert "--gin_bindings 'GROUP = 0': `GROUP" in str(error.value)
  assert '--gin_bindings \'STEPS = "ten"\': `STEPS' in str(error.value)


@functools.cache
def recipes() -> list[str]:
  """The recipes that can be read when common macros are given."""
  found = []
  for path in sorted(ROOT.glob('gin_configs/**/*.gin')):
    name = str(path.relative_to(ROOT))
    try:
      config.parse([name], given_to(name), '/runs/x')
    except ValueError as error:
      # These are read after another file.
      assert 'is not set' in str(error), error
    else:
      found.append(name)
  return found


def given_to(recipe: str) -> list[str]:
  """Bindings for what a recipe requires."""
  try:
    config.parse([recipe], [], '/runs/x')
  except ValueError as error:
    # Other sentences name macros that are set.
    required = re.search(r'The recipe requires (.*) to be set', str(error))
    if required:
      names = re.findall(r'`([A-Z]+)`', required[1])
      return [f'{name} = "/{name.lower()}"' for name in names]
  return []


VALUES = (
  *('text', 'a\nb', '\ud800', '', 'x' * 500),
  *(-1, 0, 2.5, -0.5, 1e308, 2**31, 10**400, True, None),
  *([], (), {'a': 1}, [[{}]]),
)


def wrong_values() -> list[tuple[str, str, typing.Any]]:
  """A recipe, a parameter that it binds to a literal, and a wrong value."""
  found = []
  for recipe in recipes():
    config.parse([recipe], given_to(recipe), '/runs/x')
    for (_, selector), arguments in config_bindings.parse(
      config.text()
    ).items():
      annotations = config_parameters.annotations(selector)
      for argument, binding in arguments.items():
        annotation = annotations.get(argument)
        if annotation is None or binding.references:
          continue
        found += [
          (recipe, binding.name, value)
          for value in VALUES
          if not config_types.accepts(annotation, value)
        ]
  return found


@pytest.mark.parametrize(
  ('annotation', 'right', 'wrong'),
  [
    (int, [0, -3], [1.0, '1', None, True]),
    (float, [0, 1.5], ['1', None, False]),
    (ranges.PositiveInt | None, [1, None], [0, -1, 'x']),
    (ranges.PositiveFloat, [1e-9, 1], [0, 0.0, -1]),
    (ranges.Fraction, [0, 1, 0.5], [1.1, -0.1]),
    (ranges.Decay, [0, 0.5], [1, 1.0]),
    (tuple[int, ...], [(1, 2), ()], [(1, 'a'), 3]),
    (dict[str, float], [{'a': 1}], [{'a': 'b'}, [1]]),
    (typing.Literal['a', 'b'], ['a'], ['c', 1]),
    (typing.Callable, [print], [3, 'print']),
    (str | None, ['', None], [3, b'a']),
  ],
)
def test_annotations_take_what_they_say(annotation, right, wrong):
  assert all(config_types.accepts(annotation, x) for x in right)
  assert not any(config_types.accepts(annotation, x) for x in wrong)


@pytest.mark.parametrize(
  'recipe',
  [
    'ppo_openvla_maniskill',
    'ppo_pi0_libero',
    'ppo_pi0_metaworld',
    'grpo_openvla_oft_libero',
  ],
)
def test_recipes_with_the_settings_of_rlinf_have_its_epsilon(recipe, tmp_path):
  name = f'gin_configs/{recipe}.gin'
  config.parse([name], ['MODEL = "model"'], str(tmp_path))
  assert config.binding(optimizers.adamw, 'eps') == 1e-5
