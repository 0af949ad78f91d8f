"""Wrong command lines end with one sentence, exit code 1, and no files."""

import pytest

import front_door
from tests.doors import bindings_test

PUSH = '--gin_file=gin_configs/ppo_push.gin'
MATH = '--gin_file=gin_configs/grpo_math.gin'
FILES = {
  'bad.json': b'{"places": ',
  'zero.json': b'[0]',
  'file': b'x',
  'binary.gin': b'\xff\xfe\x00',
  'self.gin': b"include '{here}/self.gin'\n",
  'one.gin': b"include '{here}/two.gin'\n",
  'two.gin': b"include '{here}/one.gin'\n",
}
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
  ([PUSH, '--compile'], '--compile compiles a plan for other devices'),
  ([PUSH, '--eval_checkpoint=x'], '--eval_checkpoint names what is evaluated'),
  (
    [PUSH, '--eval_only', '--plan_only'],
    '--eval_only and --plan_only are both',
  ),
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
  *(
    (
      [f'--gin_file={recipe}', f'--gin_bindings={binding}'],
      f"--gin_bindings '{binding}': {message}",
    )
    for recipe, binding, message in bindings_test.WRONG
    if recipe == bindings_test.SUMS
  ),
]


@pytest.mark.parametrize(
  ('given', 'line'), WRONG, ids=[' '.join(given) for given, _ in WRONG]
)
def test_it_is_refused_and_nothing_is_written(
  given, line, tmp_path, monkeypatch
):
  monkeypatch.chdir(front_door.ROOT)
  here = tmp_path / 'here'
  here.mkdir()

  def filled(text):
    return text.replace('{here}', str(here))

  for name, text in FILES.items():
    (here / name).write_bytes(text.replace(b'{here}', bytes(here)))
  before = sorted(tmp_path.rglob('*'))
  arguments = [filled(x) for x in given]
  if not any(x.startswith('--workdir') for x in given):
    arguments.append(f'--workdir={tmp_path}/run')
  done = front_door.run(*arguments)
  assert done.returncode == 1
  (only,) = done.stderr.strip().splitlines()
  assert only.startswith(filled(line))
  assert sorted(tmp_path.rglob('*')) == before
