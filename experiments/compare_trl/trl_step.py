"""Times TRL's own GRPO trainer on the job that `job.py` wrote.

Prints one JSON object as its last line. Needs the packages of
`requirements.in` beside this file, and none of ours.
"""

import argparse
import itertools
import json
import pathlib
import resource
import statistics
import tempfile
import time

import datasets
import psutil
import torch
import transformers
import trl

GROUP, LENGTH = 8, 256


class Clocks(transformers.TrainerCallback):
  """Notes (since start, wall, CPU) seconds after each update."""

  def __init__(self):
    self.marks = []

  def on_step_end(self, args, state, control, **kwargs):
    del args, state, control, kwargs
    since_start = time.time() - psutil.Process().create_time()
    self.marks.append((since_start, time.perf_counter(), time.process_time()))


def even_tokens(lengths: list[int]):
  """A reward that is nearly free: the fraction of even tokens.

  It appends the length of each completion to `lengths`.
  """

  def reward(prompts, completions, completion_ids, **_):
    del prompts, completions
    lengths.extend(map(len, completion_ids))
    return [
      sum(token % 2 == 0 for token in row) / max(len(row), 1)
      for row in completion_ids
    ]

  return reward


def settings(arguments, prompts: int) -> trl.GRPOConfig:
  """One AdamW update a batch, without what the job does not need."""
  rows = prompts * GROUP
  pieces = rows // arguments.rows
  return trl.GRPOConfig(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    learning_rate=1e-6,
    lr_scheduler_type='constant',
    max_steps=arguments.warm_up + arguments.steps,
    per_device_train_batch_size=arguments.rows,
    gradient_accumulation_steps=pieces,
    num_generations=GROUP,
    max_completion_length=LENGTH,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    beta=0.0,  # No reference model.
    num_iterations=1,
    report_to='none',
    save_strategy='no',
    logging_strategy='no',
    disable_tqdm=True,
    seed=arguments.seed,
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('folder', type=pathlib.Path, help='that job.py wrote')
  parser.add_argument('--steps', type=int, default=6, help='measured steps')
  parser.add_argument('--warm_up', type=int, default=2, help='steps before')
  parser.add_argument(
    '--rows', type=int, default=32, help='completions of a backward pass'
  )
  parser.add_argument('--seed', type=int, default=0)
  arguments = parser.parse_args()
  if arguments.steps < 1 or arguments.warm_up < 1:
    parser.error('--steps and --warm_up must both be at least 1.')
  texts = json.loads((arguments.folder / 'prompts.json').read_text())
  if arguments.rows < 1 or len(texts) * GROUP % arguments.rows:
    parser.error(
      f'--rows is {arguments.rows}, expected a divisor of the '
      f'{len(texts) * GROUP} completions of a step.'
    )
  model = transformers.AutoModelForCausalLM.from_pretrained(
    arguments.folder, dtype=torch.float32
  )
  lengths, clocks = [], Clocks()
  trainer = trl.GRPOTrainer(
    model=model,
    reward_funcs=even_tokens(lengths),
    args=settings(arguments, len(texts)),
    train_dataset=datasets.Dataset.from_dict({'prompt': texts}),
    # The automatic class would be Qwen2's own, which splits numbers.
    processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(
      arguments.folder
    ),
    callbacks=[clocks],
  )
  trainer.train()
  marks = clocks.marks
  pairs = list(itertools.pairwise(marks[arguments.warm_up - 1 :]))
  figures = {
    'system': f'trl {trl.__version__}',
    'torch': torch.__version__,
    'cpu_seconds_per_step': statistics.median(b[2] - a[2] for a, b in pairs),
    'wall_seconds_per_step': statistics.median(b[1] - a[1] for a, b in pairs),
    'first_step_seconds': marks[0][0],
    'first_step_cpu_seconds': marks[0][2],
    'steps': len(pairs),
    'peak_rss_mib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    'rows': arguments.rows,
    'mean_length': statistics.mean(lengths),
    'completions': len(lengths),
    'step_cpu_seconds': [round(b[2] - a[2], 4) for a, b in pairs],
  }
  print(json.dumps(figures))


if __name__ == '__main__':
  main()
