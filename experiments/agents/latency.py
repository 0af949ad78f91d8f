"""Tokens a second of conversations whose tools are slow, in three ways.

  python -m experiments.agents.latency --picture experiments/agents/latency.png

An answer to every second turn, by chance, takes 1 s on average, with an
exponential distribution. The ways alternate; the first round compiles, and each
round has other latencies, so that answers come in another order. The
conversations of all rounds must have the same tokens. With `--vllm`, vLLM takes
the turns. In all three ways it decodes as many rows at once as there are slots;
the last goes on as soon as so many rows have a turn.
"""

import argparse
import functools
import json
import pathlib
import tempfile
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from rlinf_jax.agents import base as agents_base
from rlinf_jax.agents import episodes, problems
from rlinf_jax.prepare import warm_start
from rlinf_jax.prepare.agents import products
from stages import base
from stages.language import conversation, huggingface, policy_stages

ANSWER = 'error'  # The answer to every turn.


class Latencies:
  """Latencies of a round, and when its turns ended."""

  seed = 0
  seconds = 1.0

  def __init__(self):
    self.ended = []

  def wait(self, problem, turn: int, text: str):
    self.ended.append(time.perf_counter())
    name = f'{self.seed} {problem} {turn} {text}'.encode()
    rng = np.random.default_rng(zlib.crc32(name))
    if rng.random() < 0.5:
      time.sleep(rng.exponential(self.seconds))


class Slow:
  """Answers every turn with the same word, after some time."""

  def __init__(self, latencies: Latencies):
    self._latencies = latencies

  def reset(self, problem):
    self._problem, self._turn = problem, 0
    return [{'role': 'user', 'content': f'{problem}='}]

  def step(self, text: str) -> agents_base.TimeStep:
    self._turn += 1
    self._latencies.wait(self._problem, self._turn, text)
    return agents_base.TimeStep([{'role': 'tool', 'content': ANSWER}])


def draw(rng, rows, held_out):
  del held_out
  return [int(n) for n in rng.integers(100, 1000, rows)]


def make_model(folder: str, args) -> str:
  """A model with random weights; `args.ends` of about 80 tokens end a turn."""
  model = warm_start.checkpoint(
    folder,
    corpus=products.corpus,
    vocabulary=80,
    width=args.width,
    layers=args.layers,
    heads=4,
    kv_heads=2,
    feed_forward=3 * args.width,
  )
  if args.ends > 1:
    path = pathlib.Path(model) / 'config.json'
    config = json.loads(path.read_text())
    config['eos_token_id'] = [
      *range(config['vocab_size'] - args.ends + 1, config['vocab_size'])
    ]
    path.write_text(json.dumps(config))
  return model


def make_ways(args, model: str, latencies: Latencies):
  """Functions that play all conversations, by name."""
  engine = None
  if args.vllm:
    from rlinf_jax.engines import vllm

    engine = functools.partial(
      vllm.engine, max_num_seqs=args.slots, block_size=32
    )
  policy = huggingface.policy(model, response_length=args.length, engine=engine)

  def converse(slots):
    envs = episodes.envs(
      model,
      lambda: Slow(latencies),
      max_answer_tokens=8,
      chat=False,
      num_threads=args.rows,
      slots=slots,
    )
    return conversation.converse(
      policy,
      'generate',
      group_size=args.group_size,
      envs=envs,
      max_turns=args.turns,
    )

  together, slotted = converse(None), converse(args.slots)

  def in_batches(version, problem, key_B):
    parts = [
      together(
        version,
        *jax.tree.map(lambda x: x[i : i + args.slots], (problem, key_B)),
      )
      for i in range(0, args.rows, args.slots)
    ]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

  return {
    f'lockstep, batches of {args.slots}': in_batches,
    f'lockstep, all {args.rows} at once': together,
    f'{args.slots} slots': slotted,
  }


def measure(args) -> dict[str, list[dict]]:
  """Seconds, tokens and times of turns of each round, by way."""
  latencies, found = Latencies(), {}
  latencies.seconds = args.seconds
  with tempfile.TemporaryDirectory() as folder:
    model = make_model(folder, args)
    source = problems.problems(
      model,
      lambda: Slow(latencies),
      draw=draw,
      batch_size=args.rows // args.group_size,
      prompt_length=8,
      held_out=1,
      held_out_batch=1,
      chat=False,
    )
    _, problem = source.next(source.init(0), {})
    problem = policy_stages.repeat(args.group_size)(problem)
    policy = huggingface.policy(model, response_length=args.length)
    params = policy.init(jax.random.key(0))
    version = base.Version(params, jnp.int32(0))
    key_B = jax.random.split(jax.random.key(1), args.rows)
    ways = make_ways(args, model, latencies)
    expected = None
    for i in range(args.rounds + 1):
      for name, way in ways.items():
        latencies.seed, latencies.ended = f'{i} {name}', []
        if not i:
          latencies.seconds = 0.0  # It compiles.
        start = time.perf_counter()
        _, x = jax.device_get(way(version, problem, key_B))
        seconds = time.perf_counter() - start
        latencies.seconds = args.seconds
        expected = x.action if expected is None else expected
        np.testing.assert_array_equal(x.action, expected)
        ended = [at - start for at in latencies.ended]
        result = {'tokens': float(x.mask.sum()), 'seconds': seconds}
        print(i, name, result, f'turns {len(ended)}', flush=True)
        if i:
          found.setdefault(name, []).append(result | {'ended': ended})
  return found


def draw_picture(found, path: str):
  """Turns that have ended by each second, of the first measured round."""
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(figsize=(6, 3.2), layout='constrained')
  for name, results in found.items():
    ended = np.sort(results[0]['ended'])
    axes.step([0, *ended], range(len(ended) + 1), where='post', label=name)
  axes.set(xlabel='seconds', ylabel='turns that have ended')
  axes.legend(frameon=False)
  figure.savefig(path, dpi=120)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rows', type=int, default=64)
  parser.add_argument('--slots', type=int, default=16)
  parser.add_argument('--group_size', type=int, default=4)
  parser.add_argument('--turns', type=int, default=6)
  parser.add_argument('--length', type=int, default=512)
  parser.add_argument(
    '--ends',
    type=int,
    default=1,
    help='tokens of the vocabulary that end a turn',
  )
  parser.add_argument('--width', type=int, default=128)
  parser.add_argument('--layers', type=int, default=3)
  parser.add_argument('--seconds', type=float, default=1.0)
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--vllm', action='store_true')
  parser.add_argument('--picture', default=None)
  args = parser.parse_args()
  found = measure(args)
  speeds = {
    name: [x['tokens'] / x['seconds'] for x in results]
    for name, results in found.items()
  }
  print(json.dumps(speeds, indent=2))
  lockstep, *_, slotted = speeds.values()
  ratios = [a / b for a, b in zip(slotted, lockstep, strict=True)]
  print(f'figure: {min(ratios):.1f} to {max(ratios):.1f} times')
  if args.picture:
    draw_picture(found, args.picture)


if __name__ == '__main__':
  main()
