"""Stages whose rows end one by one, priced by when they do.

Decoding is not a line over its rows: it takes a step for every token of the
longest, and rows that have ended early are there early. What a step has to do
is counted or written down as work, the roofline says how long that takes on a
placement, and `planner.costs.rollout` which rows are complete by when. A piece
of the batch takes from the end of the one before it to its own: the first
groups to be complete are the first piece, the longest rows are in the last.
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from planner.costs import collectives, completions
from planner.costs.measured import Estimate, Tag
from planner.costs.work import NONE, StageWork, Work

Parts = dict[str, Estimate]


@dataclasses.dataclass(frozen=True, eq=False)
class DecodeWork:
  """What a stage that decodes has to do.

  Attributes:
    lengths: tokens of each row of the batch, or of rows like them, [N].
    step: the work of decoding one token of each row.
    token: what is to be done in a step for each token that a row looks back on.
    prompt: the work of reading the prompts of rows; none if `step` has it.
    context: tokens of a prompt, which all rows look back on.
    kept: bytes of a row that is under way: its keys and values.
    group_size: rows that are of use together.
    engine: whether all rows of the batch are begun as there is room, leave when
      they have ended and are handed on in the order in which they do, as in an
      inference engine. Else a piece is decoded, by itself, until its last row
      has ended, as by `stages.generate`.
    budget: bytes that an engine has on a device for rows that are under way.
    known: where the lengths come from.
  """

  lengths: Sequence[int]
  step: StageWork
  token: Work = NONE
  prompt: StageWork = StageWork(NONE)
  context: float = 0.0
  kept: float = 0.0
  group_size: int = 1
  engine: bool = False
  budget: float = math.inf
  known: Tag = 'assumed'

  def __post_init__(self):
    lengths = np.sort(np.asarray(self.lengths, int))
    if lengths.ndim != 1 or not len(lengths) or lengths[0] < 1:
      raise ValueError(
        f'Lengths are tokens of rows, at least one of each; got {lengths}.'
      )
    object.__setattr__(self, 'lengths', lengths)

  def seconds(self, model, flow, node, placement, rows: int) -> Parts:
    """What a call takes; the parts add up.

    Args:
      model: a `roofline.Roofline`.
      flow: as cut.
      node: of it.
      placement: where it runs.
      rows: at a time, if no engine decides that.
    """
    axes, (at, pieces) = placement.axes, node.piece
    there = max(flow.values[v].shape[0] for v in node.rows)
    parameters = collectives.Parameters(flow, node, model.layout)
    copies, ways = model.layout.row_ways(axes), parameters.ways(axes)
    speed = decode_speed(self, rows, model, parameters, placement)
    once, again = speed.gather + model.cluster.device.launch_seconds, 0
    if self.engine:
      each = there * pieces // copies
      ends = _ends(self, speed, each, self.slots(each, ways), copies)
      groups = len(ends)
      last = [math.ceil(groups * k / pieces) - 1 for k in (at, at + 1)]
      steps = ends[last[1]] - (ends[last[0]] if at else 0.0)
      prompts = 0.0 if at else speed.read(each)
      once = 0.0 if at else once
    else:
      again = there / rows
      last = longest(self.lengths, rows)
      context = self.context + last / 2  # Of all steps in the mean.
      steps = again * last * speed(rows / copies, context)
      prompts = again * speed.read(rows / copies)
    tag = 'assumed' if self.known == 'assumed' else 'modeled'
    return {
      'parameters, launch': Estimate(once, 'modeled'),
      'prompts': Estimate(prompts, 'modeled'),
      'steps until rows end': Estimate(float(steps), tag),
    }

  def at(self, rows: float) -> Work:
    """The work of a step."""
    return self.step.at(rows)

  def slots(self, rows: float, ways: int) -> int:
    """Rows that are under way at a time on devices with one copy."""
    if not self.kept:
      return int(rows)
    return int(max(1, min(rows, self.budget * ways // self.kept)))

  def bytes(self, flow, node, axes, layout, pieces: int, rows) -> Parts:
    """What a device holds while rows are under way.

    Args:
      flow: as recorded.
      node: of it.
      axes: of the place.
      layout: how values lie on meshes.
      pieces: in how many the batch passes.
      rows: at a time; None for all.
    """
    there = max(flow.values[v].shape[0] for v in node.rows)
    parameters = collectives.Parameters(flow, node, layout)
    copies, ways = layout.row_ways(axes), parameters.ways(axes)
    if self.engine:
      slots = self.slots(there / copies, ways)
    else:
      slots = (rows or there / pieces) / copies
    work = self.step.near(slots)
    item = max(map(collectives.item_bytes, work.per_row.matmul), default=0)
    kept = slots * self.kept / ways
    return {
      'rows under way': Estimate(kept, 'modeled'),
      'activations': Estimate(work.at(slots).bytes_alive / ways, 'modeled'),
      'gathered parameters': Estimate(
        parameters.gathered(axes, item), 'modeled'
      ),
    }


def from_work(
  call: StageWork,
  lengths: Sequence[int],
  known: Tag = 'measured',
) -> DecodeWork:
  """A stage that was counted as if every row were as long as it may be.

  Args:
    call: its work. All steps are taken to be alike, and the prompts to be part
      of them.
    lengths: tokens of rows like its own.
    known: where they come from.

  Raises:
    ValueError: if nothing of it may end early, or not with such lengths.
  """
  tokens = call.full_batch.turns
  if not tokens:
    raise ValueError('It has no loop that may end early: all rows are alike.')
  if max(lengths, default=0) > tokens:
    raise ValueError(
      f'There are lengths of up to {max(lengths)} tokens, and rows have room '
      f'for {tokens:g}.'
    )

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


def _alive(work, plain):
  """Memory is not shared out over steps."""
  return dataclasses.replace(work, bytes_alive=plain.bytes_alive)


def longest(lengths, rows: float) -> float:
  """Tokens of the longest of so many rows, in the mean of draws.

  E[max] = Σₜ 1 - F(t)ⁿ, where F(t) is the share of rows of at most t tokens.
  """
  share = np.cumsum(np.bincount(lengths)) / len(lengths)
  return float(np.sum(1 - np.minimum(share, 1.0) ** rows))


class LinearTime(NamedTuple):
  """Seconds: so many fixed, a row, and a token that a row looks back on."""

  fixed: float
  row: float
  token: float = 0.0

  def at(self, rows, context=0.0):
    return self.fixed + rows * (self.row + self.token * context)


class DecodeSpeed(NamedTuple):
  """Seconds of a step, as `rollout.Step`, on devices that share one copy.

  Attributes:
    arithmetic: the longer of this
    traffic: and this counts;
    communication: this always does, with gaps between kernels.
    prompts: seconds to read those of so many rows: arithmetic and traffic.
    gather: seconds to gather parameters.
  """

  arithmetic: LinearTime
  traffic: LinearTime
  communication: LinearTime
  prompts: tuple[LinearTime, LinearTime]
  gather: float

  def __call__(self, rows, context=0.0):
    longer = np.maximum(
      self.arithmetic.at(rows, context), self.traffic.at(rows, context)
    )
    return longer + self.communication.at(rows)

  def read(self, rows: float) -> float:
    return max(line.at(rows) for line in self.prompts)


def decode_speed(
  decode: DecodeWork, rows, model, parameters, placement
) -> DecodeSpeed:
  """How fast a placement decodes.

  Args:
    decode: what is to be done.
    rows: at a time.
    model: a `roofline.Roofline`.
    parameters: of the stage.
    placement: where it runs.
  """
  device, assumed = model.cluster.device, model.assumed
  axes = placement.axes
  ways, copies = parameters.ways(axes), model.layout.row_ways(axes)

  def lines(call, token=NONE):
    some = call.fixed, call.per_row, token
    arithmetic, traffic = [], []
    for work in some:
      other = work.other_flops / (
        device.vector_flops * assumed.vector_efficiency
      )
      products = sum(
        flops / (device.peak(kind) * assumed.matmul_efficiency)
        for kind, flops in work.matmul.items()
      )
      arithmetic.append((other + products) / ways)
      moved = work.bytes_moved / (
        device.memory_bandwidth * assumed.memory_efficiency
      )
      traffic.append(moved / ways)
    return LinearTime(*arithmetic), LinearTime(*traffic)

  def communication_seconds(rows, gather):
    spent = 0.0
    for part in collectives.communication(
      parameters, step.at(rows * copies), axes
    ):
      if part.what.startswith('gather') == gather:
        link = model.axis_links.link(placement, part.axis)
        spent += (
          link.seconds(part.size, part.messages) * assumed.exposed_communication
        )
    return spent

  step = decode.step.near(rows)
  gaps = step.at(rows).kernels * device.kernel_gap_seconds
  one = communication_seconds(1, False)
  more = communication_seconds(2, False) - one
  arithmetic, traffic = lines(step, decode.token)
  prompts = lines(decode.prompt.near(rows))
  return DecodeSpeed(
    arithmetic,
    traffic,
    LinearTime(gaps + one - more, more),
    prompts,
    communication_seconds(1, True),
  )


@functools.lru_cache(1024)
def _ends(
  decode: DecodeWork, speed: DecodeSpeed, rows: int, slots: int, copies: int
):
  """When the first k groups are complete on a typical copy, [groups].

  Its rows are spread like those of the batch, whose longest is among them: the
  batch has ended when that has.
  """
  rows = max(rows, decode.group_size)
  share = (np.arange(rows) + 0.5) / rows
  lengths = np.quantile(decode.lengths, share, method='nearest')
  last = longest(decode.lengths, rows * copies)
  lengths[-1] = max(lengths[-1], round(last))
  lengths = np.random.default_rng(0).permutation(lengths).astype(int)
  done = completions.finish(lengths, speed, slots=slots, prompt=decode.context)
  return completions.finished_groups(done, decode.group_size)
