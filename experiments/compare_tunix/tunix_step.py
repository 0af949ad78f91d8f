"""Times google-tunix's own GRPO learner on the configuration of our bench.

With `--job`, the job is the one that `experiments.compare_trl.job` wrote, whose
completions have a long tail of lengths.

Prints one JSON object as its last line. Needs the packages of
`requirements.txt` beside this file, and none of ours.
"""

import argparse
from collections.abc import Iterator, Sequence
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import resource
import statistics
import time
from typing import NamedTuple

from flax import nnx
import jax
import numpy as np
import optax
import tunix
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

GROUP = 8
CONFIG = qwen2.ModelConfig(
  num_layers=4,
  vocab_size=2048,
  embed_dim=256,
  hidden_dim=704,
  num_heads=4,
  head_dim=64,
  num_kv_heads=2,
  rope_theta=1_000_000,
  norm_eps=1e-6,
  use_tied_embedding=True,
)


@dataclasses.dataclass(frozen=True)
class Job:
  """Work of a step.

  Attributes:
    prompts: number of prompts of a step.
    prompt_length: the most tokens of a prompt.
    new_tokens: the most tokens of a completion.
    rate: of AdamW.
    end: the token that ends a completion; None if all have `new_tokens`.
    folder: of the model and the prompts; None for random ones.
  """

  prompts: int = 8
  prompt_length: int = 64
  new_tokens: int = 128
  rate: float = 1e-5
  end: int | None = None
  folder: pathlib.Path | None = None

  def batches(self, steps: int, seed: int) -> Iterator[Sequence[str]]:
    """Yields the prompts of each step, as numbers between spaces."""
    if self.folder:
      texts = json.loads((self.folder / 'prompts.json').read_text())
      # Words are t0, t1, …
      yield from [[text.replace('t', '') for text in texts]] * steps
      return
    generator = np.random.default_rng(seed)
    shape = self.prompts, self.prompt_length
    for _ in range(steps):
      ids = generator.integers(0, CONFIG.vocab_size, shape)
      yield [' '.join(map(str, row)) for row in ids]


def ragged(folder: pathlib.Path) -> Job:
  """The job that `experiments.compare_trl.job` wrote to a folder."""
  prompts = len(json.loads((folder / 'prompts.json').read_text()))
  end = json.loads((folder / 'config.json').read_text())['eos_token_id']
  return Job(prompts, 32, 256, 1e-6, end, folder)


class NumberTokenizer:
  """Reads and writes token ids as decimal numbers between spaces.

  Where a job has no end token, this and padding are ids that the model cannot
  sample, and no completion is masked. Otherwise padding, which prompts then
  have, is the last token of the vocabulary, as in `experiments.compare_trl`.
  """

  def __init__(self, end: int | None):
    self.end = CONFIG.vocab_size if end is None else end
    self.pad = CONFIG.vocab_size + (1 if end is None else -1)

  def encode(self, text):
    return [int(word) for word in text.split()]

  def decode(self, ids):
    return ' '.join(map(str, ids))

  def bos_id(self):
    return None

  def eos_id(self):
    return self.end

  def pad_id(self):
    return self.pad


def seconds_since_process_start() -> float:
  """Wall seconds since the kernel started this process, to about 0.01 s."""
  with open('/proc/self/stat') as file:
    # The name in brackets may hold spaces: field 22 is the 20th after it.
    ticks = int(file.read().rpartition(')')[2].split()[19])
  started = ticks / os.sysconf('SC_CLK_TCK')
  return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def random_model(mesh, seed: int) -> nnx.Module:
  """A Qwen2 with normal weights of deviation 0.02, made on the host.

  Built as tunix's own checkpoint loaders do, abstractly first: its
  constructor run op by op would add compilations to the first step.
  """
  abstract = nnx.eval_shape(lambda: qwen2.Qwen2(CONFIG, rngs=nnx.Rngs(0)))
  graph, state = nnx.split(abstract)
  generator = np.random.default_rng(seed)

  def fill(path, leaf, sharding):
    if leaf.ndim > 1:
      value = generator.standard_normal(leaf.shape, np.float32) * 0.02
    else:
      is_bias = 'bias' in jax.tree_util.keystr(path)
      value = np.full(leaf.shape, 0.0 if is_bias else 1.0, np.float32)
    return jax.device_put(value, sharding)

  with jax.set_mesh(mesh):
    shardings = nnx.get_named_sharding(state, mesh)
  state = jax.tree_util.tree_map_with_path(fill, state, shardings)
  return nnx.merge(graph, state)


class Mark(NamedTuple):
  """The clocks at the end of a step, in seconds."""

  since_start: float
  wall: float
  cpu: float


def loaded_model(mesh, folder: pathlib.Path) -> nnx.Module:
  """The Qwen2 of a folder in Hugging Face's layout, by tunix's loader."""
  return params.create_model_from_safe_tensors(str(folder), CONFIG, mesh)


def prompts_between_marks(batches, finish, marks: list[Mark]):
  """Yields the prompts of each step and notes the clocks between steps.

  The learner asks for the next batch when the step before is over, so being
  asked is the boundary; `finish` waits for what may still be in flight.
  """
  for step, texts in enumerate(itertools.chain(batches, [None])):
    if step:
      finish()
      marks.append(
        Mark(
          seconds_since_process_start(),
          time.perf_counter(),
          time.process_time(),
        )
      )
    if texts is not None:
      # An array, not a list: the learner repeats leaves with numpy.
      yield {'prompts': np.array(texts)}


def first_token_is_odd(job: Job, lengths: list[int]):
  """A reward: 1 where a completion begins with an odd token, nearly free.

  It appends the length of each completion to `lengths`, and raises ValueError
  if one has not exactly `new_tokens` in a job without an end token.
  """

  def reward(prompts, completions, **_):
    del prompts
    rows = [completion.split() for completion in completions]
    lengths.extend(map(len, rows))
    if job.end is None and {*map(len, rows)} != {job.new_tokens}:
      raise ValueError(
        f'Completions have {sorted({len(row) for row in rows})} tokens, '
        f'expected {job.new_tokens} each: the comparison would not be of one '
        'job.'
      )
    return [float(int(row[0]) % 2) if row else 0.0 for row in rows]

  return reward


def training_config(job: Job, steps: int, train_micro_batch: int):
  """One AdamW update a batch, its gradient summed over pieces of the batch.

  Args:
    job: what a step does.
    steps: updates that will be made.
    train_micro_batch: prompts whose completions go through one backward pass.
      All of them are the whole batch at once.
  """
  config = functools.partial(
    rl_cluster.RLTrainingConfig,
    actor_optimizer=optax.adamw(job.rate),
    eval_every_n_steps=steps + 1,
    # One more than there are batches: the learner then asks for the batch
    # after the last, which is how the end of the last step is seen.
    max_steps=steps + 1,
  )
  if train_micro_batch == job.prompts:
    # Naming any size would wrap a gradient accumulator around AdamW.
    return config()
  return config(
    mini_batch_size=job.prompts,
    train_micro_batch_size=train_micro_batch,
    rollout_micro_batch_size=job.prompts,
    compute_logps_micro_batch_size=job.prompts,
  )


def make_learner(
  job: Job, mesh, model, training, lengths
) -> grpo_learner.GRPOLearner:
  """tunix's GRPO learner with everything off that the job does not need."""
  cluster = rl_cluster.RLCluster(
    actor=model,
    tokenizer=NumberTokenizer(job.end),
    cluster_config=rl_cluster.ClusterConfig(
      # One mesh for both roles: the sampler reads the trainer's own weights.
      role_to_mesh={
        rl_cluster.Role.ACTOR: mesh,
        rl_cluster.Role.ROLLOUT: mesh,
      },
      rollout_engine='vanilla',
      training_config=training,
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=job.new_tokens,
        max_prompt_length=job.prompt_length,
        kv_cache_size=job.prompt_length + job.new_tokens,
        # No truncation: tunix then samples without sorting the vocabulary.
        temperature=1.0,
        top_p=1.0,
        top_k=None,
      ),
    ),
  )
  return grpo_learner.GRPOLearner(
    cluster,
    grpo_learner.GRPOConfig(
      num_generations=GROUP,
      num_iterations=1,  # No pass for the old policy's log-probabilities.
      beta=0.0,  # No pass of a reference model.
    ),
    reward_fns=first_token_is_odd(job, lengths),
  )


def summary(marks: list[Mark], warm_up: int) -> dict:
  """The figures that `experiments/compare.py` reads, in seconds and MiB."""
  pairs = list(itertools.pairwise(marks[warm_up - 1 :]))
  return {
    'system': f'google-tunix {tunix.__version__}',
    'jax': jax.__version__,
    'cpu_seconds_per_step': statistics.median(b.cpu - a.cpu for a, b in pairs),
    'wall_seconds_per_step': statistics.median(
      b.wall - a.wall for a, b in pairs
    ),
    'first_step_seconds': marks[0].since_start,
    'first_step_cpu_seconds': marks[0].cpu,
    'steps': len(pairs),
    'peak_rss_mib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    'step_cpu_seconds': [round(b.cpu - a.cpu, 4) for a, b in pairs],
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--steps', type=int, default=8, help='measured steps')
  parser.add_argument('--warm_up', type=int, default=2, help='steps before')
  parser.add_argument(
    '--train_micro_batch',
    type=int,
    default=1,
    help='prompts a backward pass; all of them are the whole batch at once',
  )
  parser.add_argument(
    '--job', type=pathlib.Path, help='folder of experiments.compare_trl.job'
  )
  parser.add_argument('--seed', type=int, default=0)
  arguments = parser.parse_args()
  if arguments.steps < 1 or arguments.warm_up < 1:
    parser.error('--steps and --warm_up must both be at least 1.')
  job = ragged(arguments.job) if arguments.job else Job()
  if job.prompts % max(arguments.train_micro_batch, 1):
    parser.error(
      f'--train_micro_batch is {arguments.train_micro_batch}, '
      f'expected a divisor of {job.prompts}.'
    )
  jax.config.update('jax_enable_compilation_cache', False)

  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1])[:, None], ('fsdp', 'tp'))
  if job.folder:
    model = loaded_model(mesh, job.folder)
  else:
    model = random_model(mesh, arguments.seed)
  steps, lengths, marks = arguments.warm_up + arguments.steps, [], []
  training = training_config(job, steps, arguments.train_micro_batch)
  make_learner(job, mesh, model, training, lengths).train(
    prompts_between_marks(
      job.batches(steps, arguments.seed),
      lambda: jax.block_until_ready(nnx.state(model)),
      marks,
    )
  )
  figures = summary(marks, arguments.warm_up) | {
    'train_micro_batch': arguments.train_micro_batch,
    'mean_length': statistics.mean(lengths),
    'completions': len(lengths),
  }
  print(json.dumps(figures))


if __name__ == '__main__':
  main()
