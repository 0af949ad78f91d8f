"""Reads optimized HLO, the text of a program as XLA runs it.

XLA's own cost analysis counts the body of a loop once. `walk` says of each
instruction how often a call of the program executes it.
"""

from collections.abc import Iterable, Iterator, Mapping
import math
import re
from typing import NamedTuple

ARRAY = re.compile(r'\b([a-z]+\d*\w*)\[([<=\d,]*)\]')
# Of a kernel, on lines of its own.
METADATA = re.compile(r'(?<=kernel_metadata=)\{\n(.*)\n\}')
HEADER = re.compile(r'(ENTRY )?%?([\w.$-]+) ?\(.*\) -> .*\{\s*$')
ASSIGNMENT = re.compile(r'\s*(?:ROOT )?%?([\w.$-]+) = (.*)$')
OPERAND = re.compile(r'%([\w.$-]+)')
CALLED = re.compile(
  r'\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.$-]+)'
)
BRANCHES = re.compile(r'\bbranch_computations=\{([^}]*)\}')
WITHOUT_BYTES = ('token', 'opaque')
# The end of an operation names the same computation as its start.
ENDS = ('-done', '-update')


class Array(NamedTuple):
  """The type of an array.

  Attributes:
    dtype: XLA's name of its type, such as 'bf16'.
    shape: its dimensions.
  """

  dtype: str
  shape: tuple[int, ...]

  @property
  def bytes(self) -> float:
    """Bytes without padding; a type of four bits takes half a byte."""
    if self.dtype in WITHOUT_BYTES:
      return 0.0
    bits = re.search(r'\d+', self.dtype)
    return math.prod(self.shape) * (int(bits[0]) / 8 if bits else 1.0)

  def __str__(self):
    return f'{self.dtype}[{",".join(map(str, self.shape))}]'


class Instruction(NamedTuple):
  """A line of HLO.

  Attributes:
    name: its name.
    result: the type of its result, as text; a tuple is in parentheses.
    opcode: what it does, such as 'dot'.
    arguments: the text in its parentheses.
    attributes: the text after them.
  """

  name: str
  result: str
  opcode: str
  arguments: str
  attributes: str

  @property
  def operands(self) -> list[str]:
    """Names of the instructions whose results it reads."""
    return OPERAND.findall(self.arguments)

  @property
  def arrays(self) -> list[Array]:
    """The arrays of its result."""
    return arrays(self.result)

  @property
  def op_name(self) -> str:
    """The operation of JAX that it stems from; '' if unknown."""
    found = re.search(r'op_name="([^"]*)"', self.attributes)
    return found[1] if found else ''


Computation = dict[str, Instruction]


class Module(NamedTuple):
  """A program.

  Attributes:
    computations: instructions by name, for each computation by its name.
    entry: name of the computation that a call executes.
    num_partitions: number of devices that execute it together.
  """

  computations: dict[str, Computation]
  entry: str
  num_partitions: int


class Executed(NamedTuple):
  """An instruction as a call of the program executes it.

  Attributes:
    instruction: the instruction.
    times: how often it is executed.
    computation: the instructions around it, by name.
    caller: the fusion or other instruction of the enclosing computation that
      executes it as a part of itself, so that its result is not written to
      memory; None where there is none.
  """

  instruction: Instruction
  times: int
  computation: Computation
  caller: Instruction | None


def arrays(text: str) -> list[Array]:
  """Returns the arrays that a type names."""
  return [
    Array(m[1], tuple(int(n.strip('<=')) for n in m[2].split(',') if n))
    for m in ARRAY.finditer(text)
  ]


def parse(text: str) -> Module:
  """Reads a module.

  Raises:
    ValueError: if the text has no entry computation.
  """
  computations, current, entry = {}, None, None
  for line in METADATA.sub(r'{\1}', text).splitlines():
    header = HEADER.match(line)
    if header:
      current = computations[header[2]] = {}
      entry = header[2] if header[1] else entry
    elif line.startswith('}'):
      current = None
    elif current is not None:
      assignment = ASSIGNMENT.match(line)
      if assignment:
        name, right_side = assignment.groups()
        current[name] = _instruction(name, right_side)
  if entry is None:
    raise ValueError(
      'The text has no ENTRY computation: give the HLO of a whole module, as '
      '`compiled.as_text()` returns it.'
    )
  partitions = re.search(r'\bnum_partitions=(\d+)', text)
  return Module(computations, entry, int(partitions[1]) if partitions else 1)


def _instruction(name: str, text: str) -> Instruction:
  """Reads what is right of the equals sign."""
  end = _closing(text, 0) if text.startswith('(') else text.find(' ')
  result, rest = text[:end], text[end:].lstrip()
  start = rest.find('(')
  end = _closing(rest, start)
  arguments = rest[start + 1 : end - 1]
  return Instruction(name, result, rest[:start], arguments, rest[end:])


def _closing(text: str, start: int) -> int:
  """Returns the position after the parenthesis that closes that at `start`."""
  depth = 0
  for i in range(start, len(text)):
    depth += (text[i] == '(') - (text[i] == ')')
    if not depth:
      return i + 1
  return len(text)


def walk(module: Module) -> Iterator[Executed]:
  """Yields every instruction that a call executes, and how often.

  A loop counts as often as it can turn, even if it may end early, and once if
  its end is unknown. Each branch of a conditional counts.
  """
  yield from _visit(module, module.entry, 1, None)


def _visit(module, name, times, caller) -> Iterator[Executed]:
  computation = module.computations[name]
  for instruction in computation.values():
    yield Executed(instruction, times, computation, caller)
    if instruction.opcode == 'while':
      body = re.search(r'\bbody=%?([\w.$-]+)', instruction.attributes)[1]
      turns = times * (trip_count(module, instruction) or 1)
      yield from _visit(module, body, turns, caller)
    elif not instruction.opcode.endswith(ENDS):
      is_control = instruction.opcode in ('call', 'conditional')
      inside = caller if is_control else caller or instruction
      for called in _called(instruction):
        yield from _visit(module, called, times, inside)


def _called(instruction: Instruction) -> list[str]:
  """Returns the computations that an instruction executes, but for loops."""
  branches = BRANCHES.search(instruction.attributes)
  return [
    *CALLED.findall(instruction.attributes),
    *(re.findall(r'[\w.$-]+', branches[1]) if branches else ()),
  ]


def trip_count(module: Module, loop: Instruction) -> int | None:
  """Returns how often a loop turns at most; None if it cannot be seen.

  XLA notes the count of a loop that always turns equally often. Otherwise the
  condition compares a counter with a constant.
  """
  known = re.search(r'"?known_trip_count"?\D*(\d+)', loop.attributes)
  if known:
    return int(known[1])
  condition = re.search(r'\bcondition=%?([\w.$-]+)', loop.attributes)[1]
  found = set(_limits(_needed(module, condition)))
  found = found or set(_limits(_all(module.computations[condition])))
  found = found or {(n, None) for n in _integer_constants(module, condition)}
  if len({limit for limit, _ in found}) != 1:
    return None
  return min(
    -(-limit // (1 if counter is None else _step(module, loop, counter)))
    for limit, counter in found
  )


# A computation, and one of its instructions.
_Place = tuple[Mapping[str, Instruction], Instruction]


def _all(computation: Mapping[str, Instruction]) -> Iterator[_Place]:
  """Yields every instruction of a computation."""
  for instruction in computation.values():
    yield computation, instruction


def _needed(module: Module, name: str, root: str = '') -> Iterator[_Place]:
  """Yields the instructions whose conjunction the root of a computation is.

  Args:
    module: the module.
    name: the computation.
    root: another instruction in place of its root.
  """
  computation = module.computations[name]
  instruction = computation[root] if root else [*computation.values()][-1]
  if instruction.opcode in ('and', 'bitcast'):
    for operand in instruction.operands:
      if operand in computation:
        yield from _needed(module, name, operand)
  elif instruction.opcode == 'fusion':
    for called in _called(instruction):
      yield from _needed(module, called)
  else:
    yield computation, instruction


def _limits(places: Iterable[_Place]) -> Iterator[tuple[int, int | None]]:
  """Yields the constants with which counters are compared.

  Each comes with the counter's index in the state of the loop, if it is known.
  """
  for computation, instruction in places:
    if (
      instruction.opcode == 'compare'
      and 'direction=LT' in instruction.attributes
    ):
      counter, limit = map(computation.get, instruction.operands[:2])
      if limit and _is_integer_constant(limit):
        yield int(limit.arguments), counter and _index(counter)


def _index(instruction: Instruction) -> int | None:
  """Returns which part of a tuple an instruction reads; None if it does not."""
  if instruction.opcode != 'get-tuple-element':
    return None
  return int(re.search(r'\bindex=(\d+)', instruction.attributes)[1])


def _step(module: Module, loop: Instruction, counter: int) -> int:
  """Returns what a turn adds to a counter: n where n turns were made one."""
  name = re.search(r'\bbody=%?([\w.$-]+)', loop.attributes)[1]
  body = module.computations[name]
  *_, root = body.values()
  if root.opcode != 'tuple':
    return 1
  added = body.get(root.operands[counter])
  if not added or added.opcode != 'add':
    return 1
  terms = [body[operand] for operand in added.operands]
  steps = [int(x.arguments) for x in terms if _is_integer_constant(x)]
  if len(steps) == 1 and counter in map(_index, terms):
    return steps[0]
  return 1


def _is_integer_constant(instruction: Instruction) -> bool:
  is_integer = re.match(r'[su](?:32|64)\[\]', instruction.result)
  return bool(is_integer) and instruction.opcode == 'constant'


def _integer_constants(module: Module, name: str) -> Iterator[int]:
  """Yields the integer scalars of a computation and those that it calls."""
  for instruction in module.computations[name].values():
    if _is_integer_constant(instruction):
      yield int(instruction.arguments)
    for called in _called(instruction):
      yield from _integer_constants(module, called)
