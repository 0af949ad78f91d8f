"""Command lines of programs: flags, operands, and errors in a sentence."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import os
import pathlib
import sys

from absl import app, flags, logging
import safetensors

from rlinf_jax.config import config_errors

LONGEST = 200  # Characters of an argument in a message.
# Errors that the user can mend: they are printed without a traceback.
USER_ERRORS = (
  *(ValueError, OSError, OverflowError, MemoryError, ImportError),
  safetensors.SafetensorError,  # Such as weights that a full disk refuses.
)


def run(main: Callable[..., None], *operands: str):
  """Runs a program with the flags and operands of its command line.

  Args:
    main: takes the operands as texts. Its `USER_ERRORS` are printed, and end
      the process with exit code 1.
    *operands: their names, for the usage.
  """

  def parse(argv: Sequence[str]) -> list[str]:
    try:
      words = parse_flags(argv)
    except flags.Error as error:
      refuse(of_flags(error))
    # An empty operand is a variable of a shell that is not set.
    if len(words) != len(operands) + 1 or not all(words[1:]):
      spec = sys.modules[main.__module__].__spec__
      name = spec.name.removesuffix('.__main__') if spec else argv[0]
      refuse(' '.join([f'Usage: python -m {name} [--flags]', *operands]))
    return words

  def end_in_a_sentence(argv: Sequence[str]):
    # JAX logs which backends there are not.
    logging.set_verbosity(logging.FATAL)
    try:
      main(*argv[1:])
    except USER_ERRORS as error:
      refuse(config_errors.text(error))

  app.run(end_in_a_sentence, flags_parser=parse)


def parse_flags(argv: Sequence[str]) -> list[str]:
  """Parses flags; after --help and its like, ends the process.

  Returns:
    The name of the program, and what are no flags.

  Raises:
    flags.Error: for a flag or a value that there is not.
  """
  try:
    with reader_may_leave():
      return flags.FLAGS(list(argv))
  except SystemExit:
    # absl has printed the help that was asked for, and would end with an error.
    sys.exit(0)


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
  """Ends the process, without an error, if nothing reads what it prints.

  Such as with `| head`, once it has read enough.
  """
  try:
    yield
  except BrokenPipeError:
    # Python would write the rest at its exit, and fail.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit()


def refuse(message: str):
  """Prints a message and ends the process with exit code 1."""
  print(message, file=sys.stderr, flush=True)
  sys.exit(1)


def new_folder(flag: flags.FlagHolder[str]) -> pathlib.Path:
  """Makes the folder that a flag names.

  Raises:
    FileExistsError: if it exists.
  """
  folder = pathlib.Path(flag.value)
  if folder.exists():
    raise FileExistsError(f'{folder} exists: let --{flag.name} name a new one.')
  folder.mkdir(parents=True)
  return folder


def of_flags(error: flags.Error) -> str:
  """The sentence for an error of absl about flags."""
  help_ = ' --help lists the flags.'
  if not isinstance(error, flags.UnrecognizedFlagError):
    text = ' '.join(str(error).split())[:LONGEST].removesuffix('.')
    return f'{text}.{help_}'
  hint = str(error).partition('Did you mean: ')[2].removesuffix(' ?')
  mean = f'; did you mean --{hint}?' if hint else '.'
  setting = (
    f' A setting of the recipe is --gin.{error.flagname[:LONGEST]}=value.'
    if error.flagname.isupper() and 'gin_file' in flags.FLAGS
    else ''
  )
  return f'There is no flag --{error.flagname[:LONGEST]}{mean}{setting}{help_}'
