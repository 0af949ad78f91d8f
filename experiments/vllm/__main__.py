"""Tokens a second of the rollout path, of a bare loop of vLLM, and of ours.

  python -m experiments.vllm --checkpoint runs/arithmetic/warm_start/model

The path is the stage of a workflow: new parameters are sent to vLLM, every row
has a seed and its log-probabilities, and arrays come out. The bare loop adds
the same prompts to the same vLLM and steps it. Both in turns, and the model's
own decoding loop with them.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from rlinf_jax.engines import vllm, vllm_engine, vllm_start
import stages
from stages import base
from stages.language import huggingface, policy_stages, stops
from stages.tasks import arithmetic

PROMPTS, GROUP, LENGTH, PROMPT = 56, 8, 40, 10  # Of the arithmetic job.


def bare(llm, prompts, stop):
  """Completes prompts and nothing else; returns the tokens made."""
  import vllm as library  # The engine has set its environment.

  how = library.SamplingParams(
    temperature=1.0,
    max_tokens=LENGTH,
    stop_token_ids=list(stop),
    ignore_eos=True,
    logprobs=0,
    detokenize=False,
    output_kind=library.sampling_params.RequestOutputKind.FINAL_ONLY,
  )
  for i, prompt in enumerate(prompts):
    llm.add_request(f'bare {i}', {'prompt_token_ids': prompt}, how)
  tokens = 0
  while llm.has_unfinished_requests():
    tokens += sum(len(made.outputs[0].token_ids) for made in llm.step())
  return tokens


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('--checkpoint', required=True)
  parser.add_argument('--rounds', type=int, default=9)
  checkpoint, rounds = vars(parser.parse_args()).values()
  source = arithmetic.problems(
    checkpoint, batch_size=PROMPTS, prompt_length=PROMPT
  )
  _, problem = source.next(source.init(0), {})
  prompt = jax.tree.map(lambda x: np.repeat(x, GROUP, axis=0), problem.prompt)
  pairs = zip(*prompt, strict=True)
  rows = [token_P[mask_P > 0].tolist() for token_P, mask_P in pairs]
  stop = stops.stop_tokens(checkpoint)
  policy = functools.partial(
    huggingface.policy, checkpoint, response_length=LENGTH
  )
  ours, theirs = policy(), policy(engine=vllm.engine)
  params = ours.init(jax.random.key(0))
  acts = {
    'the path': policy_stages.act(theirs, 'generate', group_size=GROUP),
    'our own loop': policy_stages.act(ours, 'generate', group_size=GROUP),
  }
  settings = vllm_start.Settings(
    checkpoint, huggingface.load_config(checkpoint), 256, None, None
  )
  rates = {name: [] for name in (*acts, 'bare')}
  for turn in range(rounds + 1):
    key_B = stages.keys(jax.random.key(turn), prompt)
    fresh = jax.tree.map(jnp.copy, params)
    version = jax.block_until_ready(base.Version(fresh, jnp.int32(turn)))
    for name, taken in rates.items():
      start = np.array([time.perf_counter(), time.process_time()])
      if name == 'bare':
        tokens = bare(vllm_engine.get(settings).llm, rows, stop)
      else:
        tokens = float(acts[name](version, prompt, key_B).mask.sum())
      end = np.array([time.perf_counter(), time.process_time()])
      if turn:  # The first compiles, or starts vLLM.
        taken.append(tokens / (end - start))
  for i, unit in enumerate(('second', 'CPU-second')):
    rate = {name: np.array(taken)[:, i] for name, taken in rates.items()}
    share = rate['the path'] / rate['bare']
    print(
      f'Tokens a {unit}: '
      + ', '.join(f'{k} {np.median(v):.0f}' for k, v in rate.items())
      + f'; the path is {np.median(share):.3f} of the bare loop '
      f'({share.min():.3f} to {share.max():.3f} in {rounds} rounds)',
      flush=True,
    )


if __name__ == '__main__':
  main()
