"""Samples of evaluations in a report: completions, or videos of episodes."""

import base64
from collections.abc import Iterable, Mapping, Sequence
import html
import pathlib
from typing import Any

from rlinf_jax.report import summary, video
from rlinf_jax.report.html import page
from rlinf_jax.run_files import run_folder

SAMPLES = 8  # Shown per evaluation.
LONGEST = 600  # Characters shown of a prompt or of a completion.


def videos(run: run_folder.Run) -> str:
  """Videos of the first, a middle and the last evaluation that has one."""
  found = video.paths(run.folder)
  if not found:
    return ''
  cards = ''.join(
    _video_card(run, step, found[step]) for step in _first_middle_last(found)
  )
  return (
    '<h2>Videos <small>first held-out episodes; green while the task is '
    f'solved, red if it never was</small></h2><div class="grid">{cards}</div>'
  )


def _video_card(run: run_folder.Run, step: int, path: pathlib.Path) -> str:
  data = base64.b64encode(path.read_bytes()).decode()
  picture = f'<img alt="video" src="data:image/gif;base64,{data}">'
  solved, note = run.series.get('eval/success_once'), ''
  if solved is not None and step in solved.step:
    share = float(solved.value[solved.step == step][0])
    note = f'{summary.percent(share)} of all held-out episodes succeeded'
  return page.card(f'After step {step:,}', note, picture, '', 'third')


def _first_middle_last(steps: Iterable[int]) -> list[int]:
  steps = sorted(steps)
  return sorted({steps[0], steps[len(steps) // 2], steps[-1]})


def samples(run: run_folder.Run) -> str:
  """Completions of the first, a middle and the last evaluation."""
  steps: dict[str, set[int]] = {}
  for sample in run_folder.records(run.folder, 'samples.jsonl'):
    steps.setdefault(sample['split'], set()).add(sample['step'])
  split = 'eval' if 'eval' in steps else 'train'
  if split not in steps:
    return ''
  shown = {step: [] for step in _first_middle_last(steps[split])}
  for sample in run_folder.records(run.folder, 'samples.jsonl'):
    if sample['split'] == split and sample['step'] in shown:
      shown[sample['step']].append(sample)
  columns = ''.join(
    # An evaluation without training has one step, which is not its policy's.
    _sample_column(
      'The first ones' if run.evaluation else f'After step {step:,}', samples
    )
    for step, samples in shown.items()
  )
  prompts = 'held-out prompts' if split == 'eval' else 'training prompts'
  return (
    f'<h2>Completions <small>of {prompts}</small></h2>'
    f'<div class="grid">{columns}</div>'
  )


def _sample_column(title: str, samples: Sequence[Mapping[str, Any]]) -> str:
  if any('correct' in sample for sample in samples):
    right = sum(_is_right(sample) for sample in samples)
    score = f'{right} of {len(samples)} correct'
  else:
    mean = sum(float(sample['reward']) for sample in samples) / len(samples)
    score = f'mean reward {mean:.3g}'
  cards = ''.join(_sample(sample) for sample in samples[:SAMPLES])
  return (
    f'<section class="third"><h3>{title} <small>{score}</small>'
    f'</h3>{cards}</section>'
  )


def _sample(sample: Mapping[str, Any]) -> str:
  reward = float(sample['reward'])
  kind, mark = '', ''  # A reward alone does not tell what is right.
  if 'correct' in sample:
    kind, mark = (' right', '✓ ') if _is_right(sample) else (' wrong', '✗ ')
  score = f'<span class="reward">{mark}{reward:.3g}</span>'
  # Of problems whose answers are no texts, there is none.
  texts = sample['prompt'], sample['completion'], sample.get('answer', '')
  prompt, completion, answer = (
    html.escape(text if len(text) <= LONGEST else text[:LONGEST] + ' …')
    for text in map(str, texts)
  )
  return (
    f'<div class="sample{kind}">{score}'
    f'<pre><i>{prompt}</i>{completion}</pre>'
    f'{answer and f"<small>The answer is {answer}</small>"}</div>'
  )


def _is_right(sample: Mapping[str, Any]) -> bool:
  return float(sample.get('correct', 0.0)) == 1.0
