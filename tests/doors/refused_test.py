"""Wrong command lines end with one sentence, exit code 1, and no files."""

import random

import pytest

import front_door
from tests.doors import bindings_test, syntax_test

SUMS = bindings_test.SUMS
PUSH = '--gin_file=gin_configs/ppo_push.gin'
MATH = '--gin_file=gin_configs/grpo_math.gin'
FILES = {
  'bad.json': b'{"places": ',
  'zero.json': b'[0]',
  'five.json': b'{"plan": 5}',
  'infeasible.json': b'{"searched": {}, "infeasible": []}',
  'deep.json': b'[' * 10**5,
  'spaces.gin': b'A = 3\n  B = 4\n x',
  'file': b'x',
  'binary.gin': b'\xff\xfe\x00',
  'self.gin': b"include '{here}/self.gin'\n",
  'one.gin': b"include '{here}/two.gin'\n",
  'two.gin': b"include '{here}/one.gin'\n",
  'held/config.gin': b'',
  'held/run.lock': b'',
}
# A folder that holds a run, and files that there are not: before data is read.
HELD = [MATH, *(f'--gin.{x}=none' for x in ('MODEL', 'TRAIN', 'EVAL'))]
HELD += ['--workdir={here}/held']
# A parameter, a function that makes something else, its name, the message.
OTHER_FUNCTIONS = [
  (
    'train.train.source',
    '@workflows.embodied_ppo()',
    '@embodied_ppo()',
    'a Source, which a function returns (@name()), and the function returns '
    'Workflow.',
  ),
  (
    'workflows.embodied_ppo.env',
    '@optimizers.adamw()',
    '@adamw()',
    'an Env, which a function returns (@name()), and the function returns '
    'GradientTransformation.',
  ),
  (
    'workflows.embodied_ppo.policy',
    '@gaussian_policy.policy()',
    '@policy()',
    'a function (@name), and the function returns Policy.',
  ),
  (
    'workflows.embodied_ppo.policy',
    '@optimizers.adamw',
    '@adamw',
    'a function (@name), and the function returns GradientTransformation.',
  ),
  (
    'train.train.export',
    '@push.push()',
    '@push()',
    'a function (@name) or None, and the function returns Env.',
  ),
]
PLAN = '--gin_bindings=train.train.plan='
# Arguments, and the beginning of the only line; {here} is a folder of `FILES`.
WRONG = [
  ([], 'No recipe is given. Name one, such as --gin_file'),
  (['--gin_file=none.gin'], 'There is no gin file none.gin'),
  (['--gin_file={here}'], 'There is no gin file {here}'),
  (['--gin_file={here}/binary.gin'], '{here}/binary.gin is not a gin file'),
  (['--gin_file={here}/self.gin'], '{here}/self.gin includes itself'),
  (['--gin_file={here}/one.gin'], '{here}/one.gin includes itself'),
  (['--gin_file={here}/one.gin', '--help'], '{here}/one.gin includes itself'),
  (HELD, '{here}/held already holds a run: add --resume'),
  ([*HELD, '--eval_only'], '{here}/held already holds a run or an evaluation'),
  (
    [PUSH, '--gin.ray_address=local'],
    '`ray_address` is set but nothing reads it; write it in full: '
    '`train.train.ray_address`',
  ),
  ([PUSH, '--compile'], '--compile compiles a plan for other devices'),
  ([PUSH, '--plan_json=x.json'], '--plan_json is the file for a plan that is'),
  (
    [PUSH, '--plan_only', '--plan_html={here}'],
    '--plan_html={here} is a folder: name a file in it.',
  ),
  ([PUSH, '--eval_checkpoint=x'], '--eval_checkpoint names what is evaluated'),
  (
    [PUSH, '--eval_only', '--plan_only'],
    '--eval_only and --plan_only are both',
  ),
  ([PUSH, '--resume', '--plan_only'], '--resume continues the run in --workd'),
  ([PUSH, '--eval_only', '--eval_checkpoint=/none'], '/none has no checkpoint'),
  ([PUSH, '--gin.STEPS'], '--gin.STEPS is not a setting'),
  ([PUSH, '--gin.STEPS = 3'], '--gin.STEPS = 3 is not a setting'),
  (
    [PUSH, '--gin.STEPZ=3'],
    '`STEPZ` is set but nothing reads it; did you mean',
  ),
  (
    [PUSH, '--gin_bindings=train.train.steps'],
    "--gin_bindings 'train.train.st",
  ),
  (
    [PUSH, PLAN + '[1]'],
    f"--gin_bindings '{PLAN[15:]}[1]': `train.train.plan =",
  ),
  ([PUSH, PLAN + '"{here}/none.json"'], "plan = '{here}/none.json' is neither"),
  ([PUSH, PLAN + '"{here}/bad.json"'], 'The plan {here}/bad.json is not JSON'),
  ([PUSH, PLAN + '"{here}/five.json"'], 'A plan is 5: give a dictionary.'),
  (
    [PUSH, PLAN + '"{here}/infeasible.json"'],
    '{here}/infeasible.json is the report of a search that found no plan',
  ),
  (
    [PUSH, PLAN + '"{here}/deep.json"'],
    'The plan {here}/deep.json is not JSON',
  ),
  (['--gin_file={here}/spaces.gin'], '{here}/spaces.gin: the spaces before'),
  (
    [PUSH, '--plan_only', '--cluster=none.gin'],
    'There is no gin file none.gin',
  ),
  *(
    (
      [PUSH, '--plan_only', f'--lengths={{here}}/{name}.json'],
      f'{{here}}/{name}.json should hold the tokens of completions',
    )
    for name in ('none', 'bad', 'zero')
  ),
  ([MATH], 'The recipe requires `EVAL`, `MODEL`, `TRAIN` to be set'),
  (
    [MATH, *(f'--gin.{name}=/none' for name in ('MODEL', 'TRAIN', 'EVAL'))],
    'There is no checkpoint at /none',
  ),
  ([PUSH, '--workdir={here}/file'], '{here}/file is a file: let --workdir'),
  ([PUSH, 'STEPS=3'], "'STEPS=3' is no flag: write --gin.NAME=value"),
  ([PUSH, '--STEPS=3'], 'There is no flag --STEPS. A setting of the recipe is'),
  ([PUSH, '--gin_files=x'], 'There is no flag --gin_files; did you mean --gin'),
  ([PUSH, '--resume=maybe'], 'flag --resume=maybe: '),
  ([PUSH, '--workdir=/dev/null/x'], '/dev/null/x cannot be used (Not a direct'),
  ([PUSH, '--workdir=/proc/none/x'], '/proc/none cannot be used (No such file'),
  (
    [PUSH, f'--workdir={{here}}/{"y" * 300}'],
    '{here}/yyyyyyyyyyyyyyyyyyyyyyyy',
  ),
  ([f'--gin_file={"z" * 5000}'], f'{"z" * 200}… cannot be used (File name too'),
  ([PUSH, f'--gin_bindings={"x" * 9999}'], f"--gin_bindings '{'x' * 200}…': "),
  (
    [PUSH, '--gin_bindings=workflows.embodied_ppo.num_envs = 2147483647'],
    'A number of the recipe or of its files is too large: ',
  ),
]


def bound(recipe, message, *bindings):
  """A row for bindings, of which the last is refused."""
  given = [f'--gin_bindings={x}' for x in bindings]
  shown = bindings[-1].replace('\n', '\\n')
  return [
    f'--gin_file={recipe}',
    *given,
  ], f"--gin_bindings '{shown}': {message}"


ROBOT = 'gin_configs/ppo_push.gin'
WRONG += [
  *(
    bound(recipe, message, *bindings_test.GIVEN * (recipe != SUMS), binding)
    for recipe, binding, message in bindings_test.WRONG
  ),
  *(
    bound(SUMS, message, f'MODEL = {value}')
    for value, message in syntax_test.VALUES.items()
  ),
  *(
    bound(SUMS, message, binding)
    for binding, message in syntax_test.STATEMENTS.items()
  ),
  *(
    (bound(SUMS, '', *bindings)[0], cycle)
    for bindings, cycle in bindings_test.CYCLES
  ),
  bound(ROBOT, "`STEPS = 'x'`, which", 'STEPS = 3\nSTEPS = "x"'),
  bound(ROBOT, 'the keys of a dictionary must be', 'STEPS = {[1]: 2}'),
  bound(ROBOT, 'there is no module `os.nosuch`.', 'import os.nosuch'),
  *(
    bound(ROBOT, f'`{name} = {shown}` must be {message}', f'{name} = {value}')
    for name, value, shown, message in OTHER_FUNCTIONS
  ),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
  """A folder with `FILES`."""
  monkeypatch.chdir(front_door.ROOT)
  folder = tmp_path / 'here'
  folder.mkdir()
  for name, text in FILES.items():
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(text.replace(b'{here}', bytes(folder)))
  return folder


@pytest.mark.parametrize(
  ('given', 'line'), WRONG, ids=[' '.join(given)[:150] for given, _ in WRONG]
)
def test_it_is_refused_and_nothing_is_written(given, line, here):
  arguments = [x.replace('{here}', str(here)) for x in given]
  only = front_door.refused(here.parent, *arguments)
  assert only.startswith(line.replace('{here}', str(here)))


def test_values_that_the_annotations_of_a_recipe_exclude(here, request):
  cases = bindings_test.wrong_values()
  assert len(cases) > 300
  if not request.config.getoption('--claims'):
    cases = random.Random(0).sample(cases, 60)
  for recipe, name, value in cases:
    bindings = [*bindings_test.given_to(recipe), f'{name} = {value!r}']
    given, place = bound(recipe, '', *bindings)
    line = front_door.refused(here.parent, *given)
    assert line.startswith(place[:200]) and f'`{name} = ' in line
    assert 'must be ' in line or 'too large' in line
