"""Bindings of a recipe that would save the memory that a plan lacks."""

from collections.abc import Iterator
import dataclasses
from typing import NamedTuple

from planner import formatting
from planner.costs import roofline
from planner.explain import plan_data
from planner.ir import graph, groups
from planner.ir import plan as plan_lib
from rlinf_jax.config import config_values
from stages import remat as remat_lib

ACTIVATIONS, BETWEEN = 'activations', 'values between stages'
CACHE = 'keys and values of active rows'
REFERENCE = 'ref_logp'  # The stage of the KL term.
# These settings of a model's remat leave nothing to choose or to save.
SAVING = (remat_lib.AUTO, 'nothing_saveable')


class Refused(NamedTuple):
  """A stage that a compiler refused.

  Attributes:
    stage: its name.
    lacks: bytes of each device that it lacks.
  """

  stage: str
  lacks: float


def shortage(
  flow: graph.Flow,
  model: roofline.Roofline,
  chosen: plan_lib.Plan,
  refused: Refused | None = None,
) -> tuple[str, list[str]]:
  """Explains why a plan does not fit, at the place that lacks most bytes.

  Args:
    flow: as recorded.
    model: the cost model.
    chosen: a plan that needs too much memory.
    refused: its stage that needs too much by a compiler, of whose place the
      parts are explained; None if it is the model that has it not fit.

  Returns:
    A sentence on the memory of that place, and a sentence for each binding that
    acts on at least as many bytes as are lacking.
  """
  if refused:
    place = chosen.stages[refused.stage]
    peak = model.explain_memory(flow, chosen, place, refused.stage)
    short, whose = refused.lacks, ', as compiled; the model has'
  else:
    peaks = {
      name: model.explain_memory(flow, chosen, name) for name in chosen.places
    }
    place = max(peaks, key=lambda name: peaks[name].total.value)
    peak, whose = peaks[place], ''
    short = peak.total.value - model.capacity
  stage = next(iter(peak), '').partition(plan_data.DURING)[2]
  parts = {
    what.partition(plan_data.DURING)[0]: number.value
    for what, number in peak.items()
  }
  largest = ', '.join(
    f'{formatting.byte_size(size)} {what}'
    for what, size in sorted(parts.items(), key=lambda item: -item[1])
    if size
  )
  sentence = (
    f'{place} lacks {formatting.byte_size(short)} on each device during '
    f'{stage or "every stage"}{whose}: {largest}.'
  )
  found = _remedies(flow, model, chosen, place, stage, parts, short)
  return sentence, list(found)


def _remedies(flow, model, chosen, place, stage, parts, short) -> Iterator[str]:
  """Yields a sentence for each binding that would help."""
  nodes = [node for node in flow.nodes if node.name == stage]
  activations = parts.get(ACTIVATIONS, 0.0)
  if activations >= short and nodes and nodes[0].stage.grain == 'sum':
    for name, value in config_values.read('remat').items():
      if value not in SAVING:
        yield (
          f"{name} = 'auto' lets the plan compute activations of {stage} "
          f'({formatting.byte_size(activations)}) again and store fewer.'
        )
  if nodes and activations:
    yield from _packing(flow, model, chosen, place, nodes[0], parts, short)
  if parts.get(CACHE, 0.0) + activations >= short:
    yield from _slots(stage, parts)
  if nodes:
    yield from _micro_batch(flow, model, chosen, place, nodes[0], short)
  if activations + parts.get(BETWEEN, 0.0) >= short:
    for parameter in ('batch_size', 'response_length'):
      for name, value in config_values.read_numbers(parameter).items():
        yield f'{name} below {value} makes activations and batches smaller.'
  yield from _reference(flow, model, chosen, place, short)
  if sum(parts.values()) >= 2 * short:
    for name, value in config_values.read_numbers('num_devices').items():
      yield f'{name} above {value} shares memory among more devices.'


def _packing(flow, model, chosen, place, node, parts, short) -> Iterator[str]:
  """Yields packed rows of one completion, if they would save enough.

  A device computes one packed row at a time, and otherwise all rows of its
  micro-batch, or at least a group of them.
  """
  prompts = config_values.read_numbers('prompt_length').values()
  lengths = config_values.read_numbers('response_length').values()
  if not prompts or not lengths or node.stage.grain != 'sum':
    return
  tokens = max(prompts) + max(lengths)
  rows = chosen.micro_batch.get(node.name) or (
    flow.rows_of(node) / chosen.pieces
  )
  own = rows / model.layout.row_ways(chosen.places[place].axes)
  activations = parts[ACTIVATIONS]
  for name, value in config_values.read('packed_tokens').items():
    now, what = own, f'all {own:g} rows of a device together'
    if value is not None:
      now, what = value / tokens, f'{value} tokens at a time'
    if now > 1 and activations * (1 - 1 / now) >= short:
      yield (
        f'{name} = {tokens} lets {node.name} compute one packed row at a time '
        f'instead of {what}, which saves up to '
        f'{formatting.byte_size(activations * (1 - 1 / now))}.'
      )


def _slots(stage, parts) -> Iterator[str]:
  """Yields the number of rows that are decoded at once."""
  for name, value in config_values.read('slots').items():
    if parts.get(CACHE):
      fewer = '= a number' if value is None else f'below {value}'
      yield (
        f'{name} {fewer} keeps the keys and values of fewer rows of {stage} '
        f'({formatting.byte_size(parts[CACHE])}).'
      )


def _micro_batch(flow, model, chosen, place, node, short) -> Iterator[str]:
  """Yields a small micro-batch of a stage that would save enough.

  It is a group for each device, or if that is too much, a row where groups may
  be divided. Where packed rows are computed one at a time, it saves hardly
  anything.
  """
  rows = flow.rows_of(node)
  if node.stage.grain not in ('row', 'sum') or node.stage.host or not rows:
    return
  axes = chosen.places[place].axes
  at_once = chosen.micro_batch.get(node.name) or rows // chosen.pieces
  before = model.memory(flow, chosen, place)[node.name]
  for each in dict.fromkeys((node.stage.group_size, 1)):
    least = each * model.layout.row_ways(axes)
    is_possible = groups.can_take(node.stage, each) and not rows % least
    if not is_possible or least >= at_once:
      continue
    micro_batch = dict(chosen.micro_batch) | {node.name: least}
    smaller = dataclasses.replace(chosen, micro_batch=micro_batch)
    saved = before - model.memory(flow, smaller, place)[node.name]
    if saved >= short:
      yield (
        f'train.train.plan may give {node.name} a micro_batch of {least} rows '
        f'instead of {at_once}, which saves {formatting.byte_size(saved)}.'
      )
      return


def _reference(flow, model, chosen, place, short) -> Iterator[str]:
  """Yields the weight of the KL term, without which no reference is kept."""
  if chosen.stages.get(REFERENCE) != place:
    return
  here = [
    v
    for v in flow.constants
    # Frozen weights beside an adapter are read by other stages, too.
    if {flow.nodes[i].name for i in flow.readers.get(v, ())} == {REFERENCE}
  ]
  axes = chosen.places[place].axes
  kept = sum(model.layout.local(flow.values[v], axes) for v in here)
  for name, value in config_values.read('kl_coef').items():
    if value and kept >= short:
      yield (
        f'{name} = 0 keeps no reference ({formatting.byte_size(kept)}); it is '
        'another objective.'
      )
