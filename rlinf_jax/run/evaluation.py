"""Evaluation of a loaded runtime on held-out batches, of one set or several."""

from collections.abc import Iterator, Sequence
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from rlinf_jax.run import right_answers
from rlinf_jax.runtime import base as runtime_base
from stages import base, core, metrics
from stages.language import tokens
from stages.language.evaluate import SAMPLES

FEW = 4  # Completions of an evaluation that a run logs.
SECONDS = 'time/evaluate'  # A metric that every evaluation has.
ALL = 'all'  # Name of all problems together, among the names of sets.


class HeldOut(NamedTuple):
  """The held-out batches of a source.

  Attributes:
    batches: the batches, of one shape.
    names: the name of the set that each belongs to; None for one set without
      a name.
  """

  batches: list[Any]
  names: list[str] | None

  @classmethod
  def of(cls, source: base.Source) -> 'HeldOut':
    names = source.held_out_names() if source.held_out_names else None
    return cls(source.held_out(), names)


def evaluate_batch(
  runtime: runtime_base.Runtime, held_out: HeldOut, i: int, key: jax.Array
) -> base.Info:
  """The metrics of batch `i`, on the host; `key` is that of the run."""
  # Rows at the same place of two batches must not be sampled alike, nor those
  # of a batch and of training step `i`.
  key = jax.random.fold_in(jax.random.fold_in(key, core.EVALUATE), i)
  return jax.device_get(runtime.evaluate(held_out.batches[i], key))


def summarize(
  infos: Sequence[base.Info], names: Sequence[str] | None
) -> tuple[dict[str, float], dict[str, Any]]:
  """The numbers and the rows of an evaluation.

  Of several sets, a metric `eval/x` is that of all problems together, and
  `eval/NAME/x` that of one set.

  Args:
    infos: of each batch.
    names: the name of the set of each batch; None for one set.
  """
  sets = _by_set(infos, names)
  values, rows = metrics.read(sets.pop(ALL))
  for name, info in sets.items():
    for metric, value in metrics.read(info)[0].items():
      head, _, tail = metric.partition('/')
      values[f'{head}/{name}/{tail}'] = value
  return values, rows


def few_rows(rows: base.Info) -> base.Info:
  """Some rows of an evaluation to show, evenly spread over its problems.

  The first ones could be several completions of one problem.

  Args:
    rows: arrays by name; where `weight` is among them, rows of weight 0 are
      padding.
  """
  kept = np.arange(len(jax.tree.leaves(rows)[0]))
  if 'weight' in rows:
    kept = np.flatnonzero(rows['weight'])
  chosen = np.linspace(0, len(kept) - 1, min(len(kept), FEW)).astype(int)
  return jax.tree.map(lambda x: x[kept[chosen]], rows)


def _by_set(
  infos: Sequence[base.Info], names: Sequence[str] | None
) -> dict[str, base.Info]:
  """The merged metrics of each set, and then of all problems, as `ALL`."""
  sets = {}
  for info, name in zip(infos, names or (), strict=bool(names)):
    sets.setdefault(name, []).append(info)
  sets[ALL] = infos
  merge = functools.partial(functools.reduce, metrics.merge)
  return {name: merge(batches) for name, batches in sets.items()}


def results(
  infos: Sequence[base.Info], names: Sequence[str] | None
) -> dict[str, dict[str, Any]]:
  """The numbers of each set and of all problems, with confidence intervals.

  Args:
    infos: of each batch.
    names: the name of the set of each batch; None for one set.

  Returns:
    By set or task, then by metric without its `eval/`: its value; of scores,
    also 'stderr', 'interval' of 95 % and the number of 'problems'. All problems
    together are the set `ALL`.
  """
  sets = _by_set(infos, names)
  if len(sets) == 2:  # A single set is all problems.
    del sets[ALL]
  results = {name: _results(info) for name, info in sets.items()}
  whole = [*results.values()][-1]
  return _by_task(whole) | results


def _by_task(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
  """Removes the scores of tasks, 'TASK/success_once'; returns them by task."""
  score = 'success_once'
  tasks = [x for x in values if x.endswith(f'/{score}')]
  return {x.removesuffix(f'/{score}'): {score: values.pop(x)} for x in tasks}


def _results(info: base.Info) -> dict[str, Any]:
  numbers, _ = metrics.read(info)
  values = {
    name.removeprefix('eval/'): {'value': value}
    for name, value in numbers.items()
    if not name.endswith('_stderr')
  }
  for name, metric in info.items():
    if isinstance(metric, metrics.Score) and metric.count > 0:
      values[name.removeprefix('eval/')] |= {
        'stderr': float(metric.standard_error()),
        'interval': list(map(float, metric.interval())),
        'problems': int(metric.count),
      }
  return values


def completions(
  info: base.Info, source: base.Source, held_out: HeldOut, i: int
) -> Iterator[dict[str, Any]]:
  """Yields the completions of batch `i` as text, with their rewards.

  Args:
    info: the metrics of the batch; nothing is yielded where it has no rows.
    source: decodes tokens by its `text`.
    held_out: all batches.
    i: the number of the batch.
  """
  if SAMPLES not in info:
    return
  rows = info[SAMPLES].rows
  said = tokens.through_last(rows['completion_mask'])
  texts = {
    'prompt': source.text(rows['prompt'], rows['prompt_mask']),
    'completion': source.text(rows['completion'], said),
  }
  B = jax.tree.leaves(held_out.batches[i])[0].shape[0]
  samples = len(rows['reward']) // B
  name = held_out.names[i] if held_out.names else ALL
  before = (held_out.names or [ALL] * i)[:i].count(name) * B
  answers = right_answers.texts(held_out.batches[i])
  for row in range(len(rows['reward'])):
    if 'weight' in rows and not rows['weight'][row]:
      continue
    problem, sample = divmod(row, samples)
    failed = 'env_failed' in rows and bool(rows['env_failed'][row])
    yield {
      'set': name,
      'problem': before + problem,
      'sample': sample,
      'prompt': texts['prompt'][row],
      'completion': texts['completion'][row],
      **({'answer': answers[problem]} if answers else {}),
      'correct': float(rows['correct'][row]),
      'reward': float(rows['reward'][row]),
      'tokens': int(rows['completion_mask'][row].sum()),
      'truncated': bool(rows['truncated'][row]),
    } | ({'env_failed': True} if failed else {})
