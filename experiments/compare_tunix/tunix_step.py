"""Times google-tunix's own GRPO learner on the configuration of our bench.

Prints one JSON object as its last line. Needs the packages of
`requirements.txt` beside this file, and none of ours.
"""

import argparse
import functools
import itertools
import json
import os
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
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

PROMPTS, GROUP = 8, 8
PROMPT_LENGTH, NEW_TOKENS = 64, 128
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


class NumberTokenizer:
  """Reads and writes token ids as decimal numbers between spaces.

  Padding and end of sequence are ids that the model cannot sample, so every
  completion has exactly `NEW_TOKENS` tokens and none is masked.
  """

  def encode(self, text):
    return [int(word) for word in text.split()]

  def decode(self, ids):
    return ' '.join(map(str, ids))

  def bos_id(self):
    return None

  def eos_id(self):
    return CONFIG.vocab_size

  def pad_id(self):
    return CONFIG.vocab_size + 1


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


def prompts_between_marks(steps: int, seed: int, finish, marks: list[Mark]):
  """Yields one batch of prompts a step and notes the clocks between steps.

  The learner asks for the next batch when the step before is over, so being
  asked is the boundary; `finish` waits for what may still be in flight.
  """
  generator = np.random.default_rng(seed)
  for step in range(steps + 1):
    if step:
      finish()
      marks.append(
        Mark(
          seconds_since_process_start(),
          time.perf_counter(),
          time.process_time(),
        )
      )
    if step == steps:
      return
    ids = generator.integers(0, CONFIG.vocab_size, (PROMPTS, PROMPT_LENGTH))
    # An array, not a list: the learner repeats leaves with numpy.
    yield {'prompts': np.array([' '.join(map(str, row)) for row in ids])}


def first_token_is_odd(prompts, completions, **_):
  """1 where the completion begins with an odd token: nearly free, and varied.

  Raises ValueError if a completion is not exactly `NEW_TOKENS` long.
  """
  words = [completion.split(' ') for completion in completions]
  if any(len(row) != NEW_TOKENS for row in words):
    raise ValueError(
      f'Completions have {sorted({len(row) for row in words})} tokens, '
      f'expected {NEW_TOKENS} each: the comparison would not be of one job.'
    )
  return [float(int(row[0]) % 2) for row in words]


def training_config(steps: int, train_micro_batch: int):
  """One AdamW update a batch, its gradient summed over pieces of the batch.

  Args:
    steps: updates that will be made.
    train_micro_batch: prompts whose completions go through one backward pass.
      `PROMPTS` is the whole batch at once.
  """
  config = functools.partial(
    rl_cluster.RLTrainingConfig,
    actor_optimizer=optax.adamw(1e-5),
    eval_every_n_steps=steps + 1,
    # One more than there are batches: the learner then asks for the batch
    # after the last, which is how the end of the last step is seen.
    max_steps=steps + 1,
  )
  if train_micro_batch == PROMPTS:
    # Naming any size would wrap a gradient accumulator around AdamW.
    return config()
  return config(
    mini_batch_size=PROMPTS,
    train_micro_batch_size=train_micro_batch,
    rollout_micro_batch_size=PROMPTS,
    compute_logps_micro_batch_size=PROMPTS,
  )


def make_learner(mesh, model, training) -> grpo_learner.GRPOLearner:
  """tunix's GRPO learner with everything off that the job does not need."""
  cluster = rl_cluster.RLCluster(
    actor=model,
    tokenizer=NumberTokenizer(),
    cluster_config=rl_cluster.ClusterConfig(
      # One mesh for both roles: the sampler reads the trainer's own weights.
      role_to_mesh={
        rl_cluster.Role.ACTOR: mesh,
        rl_cluster.Role.ROLLOUT: mesh,
      },
      rollout_engine='vanilla',
      training_config=training,
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=NEW_TOKENS,
        max_prompt_length=PROMPT_LENGTH,
        kv_cache_size=PROMPT_LENGTH + NEW_TOKENS,
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
    reward_fns=first_token_is_odd,
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
    help=f'prompts a backward pass; {PROMPTS} is the whole batch at once',
  )
  parser.add_argument('--seed', type=int, default=0)
  arguments = parser.parse_args()
  if arguments.steps < 1 or arguments.warm_up < 1:
    parser.error('--steps and --warm_up must both be at least 1.')
  if PROMPTS % max(arguments.train_micro_batch, 1):
    parser.error(
      f'--train_micro_batch is {arguments.train_micro_batch}, '
      f'expected a divisor of {PROMPTS}.'
    )
  jax.config.update('jax_enable_compilation_cache', False)

  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1])[:, None], ('fsdp', 'tp'))
  model = random_model(mesh, arguments.seed)
  steps = arguments.warm_up + arguments.steps
  learner = make_learner(
    mesh, model, training_config(steps, arguments.train_micro_batch)
  )
  marks = []
  learner.train(
    prompts_between_marks(
      steps,
      arguments.seed,
      lambda: jax.block_until_ready(nnx.state(model)),
      marks,
    )
  )
  figures = summary(marks, arguments.warm_up)
  figures['train_micro_batch'] = arguments.train_micro_batch
  print(json.dumps(figures))


if __name__ == '__main__':
  main()
