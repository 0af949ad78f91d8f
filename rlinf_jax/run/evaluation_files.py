"""The files of an evaluation, with training or without."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import json
import pathlib
from typing import Any

from rlinf_jax.run import evaluation
from rlinf_jax.run_files import evaluations, writers
from rlinf_jax.system import whole_file
from stages import base

SHOWN = 8  # Completions that the report shows.


@contextlib.contextmanager
def completions(
  folder: pathlib.Path, source: base.Source, held_out: evaluation.HeldOut
) -> Iterator[Callable[[int, base.Info], None]]:
  """Writes completions.jsonl, and the first ones also into samples.jsonl.

  Both are left out where there are none, as of episodes.

  Args:
    folder: the folder of the evaluation.
    source: decodes tokens by its `text`.
    held_out: all batches.

  Yields:
    `i, info -> None`, which writes those of batch `i`, from its metrics. It is
    called for each batch, in order.
  """
  paths = [
    folder / name for name in (evaluations.COMPLETIONS, evaluations.SAMPLES)
  ]
  for path in paths:
    path.unlink(missing_ok=True)
  samples = writers.json_lines(paths[1])
  with (
    contextlib.closing(samples),
    paths[0].open('w', encoding='utf-8') as file,
  ):

    def write(i: int, info: base.Info):
      records = list(evaluation.completions(info, source, held_out, i))
      for record in records:
        file.write(json.dumps(record) + '\n')
      for record in records[: 0 if i else SHOWN]:
        samples.write(0, {'split': 'eval', **record})

    yield write
  for path in paths:
    if not path.stat().st_size:
      path.unlink()


def write_scores(
  folder: pathlib.Path,
  values: dict[str, float],
  infos: Sequence[base.Info],
  held_out: evaluation.HeldOut,
  subject: dict[str, Any],
) -> dict[str, Any]:
  """Writes metrics.jsonl and, last, evaluation.json.

  Args:
    folder: the folder of the evaluation.
    values: the numbers of `evaluation.summarize`, and the seconds.
    infos: the metrics of each batch.
    held_out: all batches.
    subject: what is evaluated: the run, the step and the seed.

  Returns:
    The contents of evaluation.json.
  """
  (folder / 'metrics.jsonl').unlink(missing_ok=True)
  log = writers.json_lines(folder / 'metrics.jsonl')
  log.write(0, values)
  log.close()
  record = {
    'seconds': values[evaluation.SECONDS],
    'evaluated': subject,
    'sets': evaluation.results(infos, held_out.names),
  }
  # The last, as it marks the evaluation as finished.
  whole_file.write_text(
    folder / evaluations.SCORES, json.dumps(record, indent=2)
  )
  return record
