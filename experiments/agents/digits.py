"""An agent that speaks OpenAI's API: it asks for a digit, twice.

Each of two turns names a digit and is rewarded by the share of its characters
that are this digit, so a policy must read the question, and in the second turn
read past what it wrote itself.
"""

import functools

import httpx
import numpy as np
import openai

from rlinf_jax.prepare import warm_start
from stages.language import tokens

DIGITS = '37'
TEMPLATE = (
  '{% for m in messages %}{{ m.role[0] }}{{ m.content }}'
  '{{ eos_token if m.role == "assistant" else "." }}{% endfor %}'
  '{% if add_generation_prompt %}a{% endif %}'
)


def draw(rng: np.random.Generator, rows: int, held_out: bool) -> list[dict]:
  """Problems; there are few, so held-out ones are the same."""
  del held_out
  return [
    {'question': a, 'then': b, 'answer': ''}
    for a, b in rng.choice(list(DIGITS), (rows, 2)).tolist()
  ]


def agent(base_url: str, api_key: str, problem: dict) -> float:
  """The mean over two turns of the share of the right digit."""
  client = openai.OpenAI(
    base_url=base_url, api_key=api_key, http_client=_connections()
  )
  messages, shares = [], []
  for digit in problem['question'], problem['then']:
    messages.append({'role': 'user', 'content': digit})
    reply = client.chat.completions.create(
      model='policy', messages=messages, max_tokens=4
    )
    text = reply.choices[0].message.content
    messages.append({'role': 'assistant', 'content': text})
    shares.append(text.count(digit) / max(4, len(text)))
  return sum(shares) / len(shares)


@functools.cache
def _connections() -> httpx.Client:
  """One pool of connections, as making one costs more than a short episode."""
  return httpx.Client()


def corpus() -> list[str]:
  """Texts that the tokenizer knows the letters of."""
  return ['0123456789.uaxyz'] * 2


def checkpoint(workdir: str, seed: int = 0) -> str:
  """The folder of a small new model with a chat template."""
  folder = warm_start.checkpoint(
    workdir,
    corpus=corpus,
    vocabulary=17,
    width=64,
    layers=2,
    heads=4,
    kv_heads=2,
    feed_forward=128,
    rope_theta=300.0,
    seed=seed,
  )
  tokenizer = tokens.load_tokenizer(folder)
  if not tokenizer.chat_template:
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    tokens.load_tokenizer.cache_clear()
  return folder
