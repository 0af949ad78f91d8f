"""CPU-seconds of GRPO's gradient with packed and with padded completions.

  python -m experiments.packing --size 3.5M

The lengths of completions have a long tail, see `experiments.generation`. The
tokens are random: they do not affect the cost. Both ways run the `gradient`
stage on the same minibatch and alternate; the first round compiles.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.generation import long_tail
from rlinf_jax.runtime.places import micro_batch
import stages
from stages import base
from stages.language import language_model, policy_stages, rollout_metrics
from stages.learn import objectives, train_step
from stages.models import transformer


def lengths(rows: int, limit: int, median: float) -> np.ndarray:
  """Lengths whose 95th percentile is eight times their median."""
  rng = np.random.default_rng(0)
  means = long_tail.class_means(median)
  drawn = rng.geometric(1 / means[rng.integers(len(means), size=rows)])
  return np.minimum(drawn, limit)


def minibatch(args, config: transformer.Config) -> base.Experience:
  """Random completions of random prompts."""
  rng = np.random.default_rng(1)
  B, T = args.groups * args.group_size, args.length
  length_B = lengths(B, T, args.median)
  mask_BT = (np.arange(T)[None] < length_B[:, None]).astype(np.float32)
  prompt_N1 = rng.integers(args.prompt // 2, args.prompt + 1, (args.groups, 1))
  mask_NP = np.arange(args.prompt)[None] >= args.prompt - prompt_N1
  token_NP = rng.integers(1, config.V, mask_NP.shape)
  prompt = base.Prompt(token_NP.astype(np.int32), mask_NP.astype(np.int32))
  x = base.Experience(
    obs=jax.tree.map(lambda x: np.repeat(x, args.group_size, 0), prompt),
    action=rng.integers(1, config.V, (B, T), np.int32),
    logp=np.full((B, T), -np.log(config.V), np.float32),
    mask=mask_BT,
    truncated=(length_B == T).astype(np.float32),
    advantage=rng.normal(size=(B, 1)).astype(np.float32) * mask_BT,
  )
  return jax.tree.map(jnp.asarray, x)


def gradient(args, config, packed_tokens: int | None):
  """The gradient of GRPO's loss; padded rows are taken a group at a time."""
  policy = language_model.policy(
    config, response_length=args.length, packed_tokens=packed_tokens
  )
  loss = objectives.policy(policy_stages.scorer(policy, args.group_size))
  stage = stages.Stage(
    train_step.gradient(loss),
    'gradient',
    'sum',
    unbatched=(0,),
    group_size=args.group_size,
  )
  if packed_tokens is not None:
    return stage.run
  return jax.jit(micro_batch.in_micro_batches(stage, args.group_size))


def seconds(fn, *args) -> tuple[float, float]:
  """Seconds and CPU-seconds of a call."""
  wall, cpu = time.perf_counter(), time.process_time()
  jax.block_until_ready(fn(*args))
  return time.perf_counter() - wall, time.process_time() - cpu


def differ(got, want) -> float:
  """The largest ‖Δ‖/‖g‖ of any leaf of two gradients."""
  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  return max(
    float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs
  )


def padding(args, config, x: base.Experience) -> dict[str, dict[str, float]]:
  """Tokens computed, and the share of padding, without and with packing."""
  policy = language_model.policy(
    config, response_length=args.length, packed_tokens=args.packed
  )
  shares = {
    'padded': rollout_metrics.padding(x.obs.mask, x.mask, args.group_size),
    'packed': rollout_metrics.packed_padding(policy, args.group_size)(
      [(x, ())]
    )['rollout/padding'],
  }
  return {
    name: {
      'tokens': float(share.count),
      'padding': float(share.sum),
      'share': float(share.sum / share.count),
    }
    for name, share in shares.items()
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--size', choices=long_tail.SIZES, default='3.5M')
  parser.add_argument('--groups', type=int, default=8)
  parser.add_argument('--group_size', type=int, default=8)
  parser.add_argument('--prompt', type=int, default=32)
  parser.add_argument('--length', type=int, default=256)
  parser.add_argument('--median', type=float, default=12.0)
  parser.add_argument('--packed', type=int, default=512)
  parser.add_argument('--rounds', type=int, default=5)
  args = parser.parse_args()
  config = long_tail.SIZES[args.size]
  params = transformer.init_params(config, jax.random.key(0))
  x = minibatch(args, config)
  length_B = np.asarray(x.mask).sum(1)
  results = {'lengths': np.quantile(length_B, [0.5, 0.95, 1]).tolist()}
  results |= padding(args, config, x)
  ways = {'padded': None, 'packed': args.packed}
  ways = {k: gradient(args, config, n) for k, n in ways.items()}
  first = {name: fn(params, x, ()) for name, fn in ways.items()}
  results['difference'] = differ(*(first[k].numerators for k in ways))
  means = [first[k].info['train/policy_loss'].value()[''] for k in ways]
  results['loss'] = [float(mean) for mean in means]
  times = {name: [] for name in ways}
  for _ in range(args.rounds):
    for name, fn in ways.items():
      times[name].append(seconds(fn, params, x, ()))
  for name, some in times.items():
    results[name]['seconds'], results[name]['cpu_seconds'] = np.median(
      some, axis=0
    ).tolist()
  ratios = [
    padded[1] / packed[1]
    for padded, packed in zip(*times.values(), strict=True)
  ]
  results['ratio'] = [min(ratios), float(np.median(ratios)), max(ratios)]
  print(json.dumps(results, indent=2))


if __name__ == '__main__':
  main()
