"""Models the time of decoding, whose rows end one by one.

Decoding takes a step for each token of the longest row, and short rows finish
early. The work of a step is counted or given, the roofline model gives its
seconds on a placement, and `ends` the end of each row. The first piece of the
batch consists of the groups that finish first, the last piece has the longest
rows; an engine outside JAX has pieces of given rows. A piece takes from the end
of the previous piece to its own.
"""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

from planner.costs.decoding import contexts as contexts_lib
from planner.costs.decoding import ends as ends_lib
from planner.costs.decoding import speed as speed_lib
from planner.costs.measured import Estimate, Tag
from planner.costs.mesh import collectives
from planner.costs.work import NONE, StageWork, Work

Parts = dict[str, Estimate]


@dataclasses.dataclass(frozen=True, eq=False)
class DecodeWork:
  """The work of a stage that decodes.

  Attributes:
    lengths: tokens of each row of the batch, or of similar rows, [N].
    step: the work of decoding one token of each row.
    attention: additional work of a step that depends on the contexts of its
      rows, of layers of one kind each; only of an engine and of slots.
    prompt: the work of prefilling the prompts; none if `step` includes it.
    context: tokens of a prompt.
    kept: bytes of the keys and values of an active row.
    group_size: rows of a group, which are passed on together.
    engine: whether it is an inference engine with continuous batching: rows of
      the whole batch start as slots fall free, and are passed on in the order
      in which they finish, or by piece if it `is_separate`. Otherwise each
      piece is decoded by itself until its last row has finished, as in a loop
      in JAX.
    budget: bytes on a device for the keys and values of an engine, which it
      reserves as it starts; infinite if it reserves those of `max_rows` rows.
    max_rows: maximum number of active rows, on the devices that hold one copy
      of the parameters. Without an engine, each call decodes its rows in so
      many slots, which take as long where they are empty; infinite if it
      decodes all rows at once.
    continued: rows of a call that earlier calls have started. They have slots
      together, also where these are more than `max_rows`.
    all_rows: rows of a call which has those of the whole batch together, as
      partial rollouts do; 0 for others.
    cache_shards: most devices that divide the keys and values of an engine.
    is_separate: whether the engine is a program of its own, which holds its own
      copies of the parameters, as many and divided as its place's mesh says. It
      has the rows of all pieces at once, those of the first piece first, and
      passes a piece on when the last of the piece's own rows has finished.
    calls: calls in which such an engine has the same parameters.
    known: origin of the lengths.
  """

  lengths: Sequence[int]
  step: StageWork
  attention: Sequence[contexts_lib.ColumnReads] = ()
  prompt: StageWork = StageWork(NONE)
  context: float = 0.0
  kept: float = 0.0
  group_size: int = 1
  engine: bool = False
  budget: float = math.inf
  max_rows: float = math.inf
  continued: int = 0
  all_rows: int = 0
  cache_shards: float = math.inf
  is_separate: bool = False
  calls: int = 1
  known: Tag = 'assumed'

  def __post_init__(self):
    lengths = np.sort(np.asarray(self.lengths, int))
    if lengths.ndim != 1 or not len(lengths) or lengths[0] < 1:
      raise ValueError(
        f'Lengths are tokens of rows, at least one of each; got {lengths}.'
      )
    object.__setattr__(self, 'lengths', lengths)
    if self.attention and not (self.engine or self.has_slots):
      raise ValueError(
        'A loop that decodes all rows at once counts its attention in `step`: '
        'give it max_rows, or no `attention`.'
      )

  @property
  def has_slots(self) -> bool:
    """Whether it is a loop in JAX that decodes rows in slots."""
    return not self.engine and math.isfinite(self.max_rows)

  def seconds(self, model, flow, node, placement, rows: int) -> Parts:
    """Returns the seconds of a call, by component.

    Args:
      model: a `roofline.Roofline`.
      flow: as cut.
      node: a call of the stage.
      placement: its placement.
      rows: rows of a micro-batch, which an engine ignores.
    """
    axes, (at, pieces) = placement.axes, node.piece
    there = self._rows(flow, node)
    rows = self.all_rows or rows
    parameters = collectives.Parameters(flow, node, model.layout)
    copies, ways = model.layout.row_ways(axes), parameters.ways(axes)
    speed = speed_lib.decode_speed(self, rows, model, parameters, placement)
    once, again = speed.gather + model.cluster.device.launch_seconds, 0
    if self.engine:
      each = math.ceil(there * pieces / copies)  # Rows of the fullest copy.
      slots = self.slots(each, ways)
      if self.is_separate:
        each = math.ceil(there / copies) * pieces
        ends = ends_lib.of_pieces(self, speed, each, slots, copies, pieces)
        last = [at - 1, at]
      else:
        ends = ends_lib.of_groups(self, speed, each, slots, copies)
        last = [math.ceil(len(ends) * k / pieces) - 1 for k in (at, at + 1)]
      steps = ends[last[1]] - (ends[last[0]] if at else 0.0)
      prompts = 0.0 if at else speed.read(each)
      if self.is_separate:
        sent = self._sent(parameters, axes, model.cluster.device)
        once += sent / self.calls
      once = 0.0 if at else once
    elif self.has_slots:
      again, each = there / rows, max(1, rows // copies)
      ends = ends_lib.of_groups(
        self, speed, each, int(min(self._most(copies), each)), copies
      )
      steps, prompts = again * ends[-1], again * speed.read(each)
    else:
      again = there / rows
      steps = (
        again * ends_lib.longest(self.lengths, rows) * speed(rows / copies)
      )
      prompts = again * speed.read(rows / copies)
    tag = 'assumed' if self.known == 'assumed' else 'modeled'
    return {
      'parameters, launch': Estimate(once, 'modeled'),
      'prompts': Estimate(prompts, 'modeled'),
      'steps until rows end': Estimate(float(steps), tag),
    }

  def at(self, rows: float) -> Work:
    """Returns the work of a step with `rows` rows."""
    return self.step.at(rows)

  def slots(self, rows: float, ways: int) -> int:
    """Returns the active rows on devices that hold one copy of the model."""
    rows = min(rows, self.max_rows)
    if self.kept and math.isfinite(self.budget):
      shards = min(ways, self.cache_shards)
      rows = min(rows, self.budget * shards // self.kept)
    return int(max(1, rows))

  def _rows(self, flow, node) -> int:
    return self.all_rows or max(flow.values[v].shape[0] for v in node.rows)

  def _most(self, copies: int) -> float:
    """Returns the most rows that each of some devices decodes at once."""
    return max(self.max_rows, math.ceil(self.continued / copies))

  def _bytes_of(self, values) -> float:
    """Returns the bytes of parameters in an engine's type."""
    types = self.step.full_batch.matmul
    item = max(map(collectives.item_bytes, types), default=0)
    return sum(math.prod(value.shape) * item for value in values)

  def _sent(self, parameters, axes, device) -> float:
    """Returns the seconds in which an engine takes over new parameters.

    On one device they are copied. To the processes of several, they are written
    to the host's memory once, from which each reads its share. So is an
    adapter, as a file; the frozen parameters beside it were sent before.
    """
    size = self._bytes_of(parameters.updated)
    if not axes and len(parameters.updated) == len(parameters.read):
      return 2 * size / device.memory_bandwidth
    return size * (1 + 1 / parameters.ways(axes)) / device.host_bandwidth

  def bytes(self, flow, node, axes, layout, pieces: int, rows) -> Parts:
    """Returns the bytes on a device while rows are decoded, by component.

    Args:
      flow: as recorded.
      node: a call of the stage.
      axes: mesh axes of the place.
      layout: the layout of values on meshes.
      pieces: number of pieces of the batch.
      rows: rows of a micro-batch; None for all.
    """
    there = self._rows(flow, node)
    parameters = collectives.Parameters(flow, node, layout)
    copies, ways = layout.row_ways(axes), parameters.ways(axes)
    if self.engine:
      slots = self.slots(there / copies, ways)
    else:
      at_once = self.all_rows or rows or there / pieces
      slots = min(at_once / copies, self._most(copies))
    work = self.step.near(slots)
    item = max(map(collectives.item_bytes, work.per_row.matmul), default=0)
    kept = slots * self.kept / ways
    if self.is_separate:
      own = self._bytes_of(parameters.read) / ways
      needed = self.max_rows * self.kept / min(ways, self.cache_shards)
      cache = self.budget if math.isfinite(self.budget) else needed
      return {
        'keys and values of the engine': Estimate(cache, 'modeled'),
        "the engine's copy of parameters": Estimate(own, 'modeled'),
      }
    return {
      'keys and values of active rows': Estimate(kept, 'modeled'),
      'activations': Estimate(work.at(slots).bytes_alive / ways, 'modeled'),
      'gathered parameters': Estimate(
        parameters.gathered(axes, item)[0], 'modeled'
      ),
    }


def max_tokens(call: StageWork | DecodeWork) -> float:
  """Returns the most tokens of a row; 0 for a stage whose rows end together."""
  if isinstance(call, DecodeWork):
    return float(call.lengths.max())
  return call.full_batch.turns


def with_lengths(
  call: StageWork | DecodeWork, lengths: Sequence[int], known: Tag = 'measured'
) -> DecodeWork:
  """Returns the work of a stage that decodes rows of given lengths.

  Args:
    call: the counted work, as if every row had the maximum length.
    lengths: tokens of similar rows.
    known: origin of the lengths.

  Raises:
    ValueError: if the stage has no loop that may end early, or a length exceeds
      its limit.
  """
  tokens = max_tokens(call)
  if not tokens:
    raise ValueError(
      'The stage has no loop that may end early: all rows are alike.'
    )
  if max(lengths, default=0) > tokens:
    raise ValueError(
      f'There are lengths of up to {max(lengths)} tokens, and rows have room '
      f'for {tokens:g}.'
    )
  if isinstance(call, DecodeWork):
    return dataclasses.replace(call, lengths=lengths, known=known)
  return _from_work(call, lengths, known)


def _from_work(call: StageWork, lengths, known: Tag) -> DecodeWork:
  """Converts counted work; all steps are assumed to be alike.

  They include the prompts.
  """
  tokens = call.full_batch.turns

  def scaled(line):
    return StageWork(
      line.fixed.times(1 / tokens),
      line.per_row.times(1 / tokens),
      line.rows,
      tuple(map(scaled, line.below)),
    )

  def alive(line, plain):
    return dataclasses.replace(
      line,
      fixed=_alive(line.fixed, plain.fixed),
      per_row=_alive(line.per_row, plain.per_row),
      below=tuple(map(alive, line.below, plain.below)),
    )

  return DecodeWork(lengths, alive(scaled(call), call), known=known)


def of_engine(call: StageWork, cost, arguments) -> DecodeWork:
  """Returns the work of an inference engine outside JAX.

  Every row has the maximum length, until lengths are given.

  Args:
    call: counted work of the engine's equivalent in JAX.
    cost: what the stage says of its engine, `stages.EngineCost`.
    arguments: shapes of the stage's arguments.
  """
  found = with_lengths(call, [round(max_tokens(call))], 'assumed')
  return dataclasses.replace(
    found,
    kept=cost.row_cache_bytes(*arguments),
    engine=True,
    budget=cost.cache_bytes,
    max_rows=cost.max_rows,
    cache_shards=cost.cache_shards,
    is_separate=True,
    calls=cost.calls,
  )


def of_slots(call: StageWork, cost, attention, all_rows: int = 0) -> DecodeWork:
  """Returns the work of a loop in JAX that decodes rows in slots.

  Every row has the maximum length, until lengths are given.

  Args:
    call: counted work of decoding all rows at once, without their attention.
    cost: what the stage says of its slots, `stages.EngineCost`.
    attention: the work of attention in slots, `stages.core.AttentionWork`.
    all_rows: as in `DecodeWork`.
  """
  found = with_lengths(call, [round(max_tokens(call))], 'assumed')
  launched, whole, reads = NONE, NONE, []
  for layers in attention.layers:
    launched += Work(kernels=layers.kernels)
    column = Work(
      flops=layers.matmul_flops + layers.other_flops,
      matmul={layers.dtype: layers.matmul_flops},
      bytes_moved=layers.bytes,
    )
    if layers.reads == 'all':
      whole += column.times(layers.most)
    else:
      whole += column.times(layers.beyond)
      reads.append(
        contexts_lib.ColumnReads(
          column, layers.reads, layers.most, layers.window
        )
      )

  def with_attention(line):
    return dataclasses.replace(
      line,
      fixed=line.fixed + launched,
      per_row=line.per_row + whole,
      below=tuple(map(with_attention, line.below)),
    )

  return dataclasses.replace(
    found,
    step=with_attention(found.step),
    attention=reads,
    context=float(attention.prompt),
    max_rows=cost.max_rows,
    continued=cost.continued,
    all_rows=all_rows,
  )


def _alive(work, plain):
  """Restores the peak memory, which is not divided by the steps."""
  return dataclasses.replace(work, bytes_alive=plain.bytes_alive)
