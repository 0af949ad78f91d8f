"""Serves a model to agents that speak OpenAI's API, and records their calls.

  python -m rlinf_jax.serve /path/to/model

It prints two lines for the shell of the agent: the base URL and the API key.
The model is a folder in Hugging Face format with a chat template: a model to
train, or the `model` folder of a run.
"""

import importlib.util
import os
import pathlib
import secrets

from absl import flags
import jax

from rlinf_jax import command_line, startup
from rlinf_jax.agents import formats
from rlinf_jax.serve import batches, completions
from stages.language import tokens
from stages.models import huggingface

FORMATS = {
  'hermes': formats.hermes,
  'llama_json': formats.llama_json,
  'pythonic': formats.pythonic,
}
LONGEST = 1 << 20  # Tokens, of models with the longest contexts.
HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on.')
PORT = flags.DEFINE_integer(
  'port', 8000, 'Port; 0 for one that is free.', 0, 65535
)
RESPONSE_LENGTH = flags.DEFINE_integer(
  'response_length', 256, 'Most tokens of a reply.', 1, LONGEST
)
PROMPT_LENGTH = flags.DEFINE_integer(
  'prompt_length', 2048, 'Most tokens of a conversation before it.', 16, LONGEST
)
FORMAT = flags.DEFINE_enum(
  'tool_format', 'hermes', list(FORMATS), 'How the model writes tool calls.'
)
TOKEN = 'RLINF_JAX_TOKEN'  # Environment variable; flags are visible to others.


def load(
  model: str,
  *,
  prompt_length: int,
  response_length: int,
  tool_format: str = 'hermes',
) -> completions.Served:
  """Loads a model and starts its decoder.

  Raises:
    ValueError: if there is no such model, or it has no chat template.
  """
  tokenizer = tokens.load_tokenizer(model)
  formats.answer(
    tokenizer,
    [{'role': 'user', 'content': 'x'}],
    chat=True,
    keep_thoughts=True,
  )
  config = huggingface.load_config(model)
  decoder = batches.Decoder(
    config,
    jax.device_put(huggingface.load_params(model, config)),
    stop=huggingface.stop_tokens(model),
    prompt_length=prompt_length,
    response_length=response_length,
  )
  name = pathlib.Path(model).resolve().name
  return completions.Served(name, tokenizer, decoder, FORMATS[tool_format])


def _greet(served: completions.Served, url: str, drawn: str | bool):
  """Prints the URL and the model, and a token that was drawn."""
  print(f'export OPENAI_BASE_URL={url}')
  if drawn:
    print(f'export OPENAI_API_KEY={drawn}')
  print(
    f'# Serves the model {served.name!r}; up to '
    f'{served.decoder.num_programs} programs compile, each at its first '
    'request.',
    flush=True,
  )


def main(model: str):
  if importlib.util.find_spec('uvicorn') is None:
    raise ImportError(
      'The server is not installed: pip install "rlinf-jax[serve]".'
    )
  from rlinf_jax.serve import endpoint, server

  token = os.environ.get(TOKEN) or secrets.token_urlsafe(32)
  with server.listen(HOST.value, PORT.value) as listener:
    served = load(
      model,
      prompt_length=PROMPT_LENGTH.value,
      response_length=RESPONSE_LENGTH.value,
      tool_format=FORMAT.value,
    )
    with server.Server(endpoint.Endpoint(served, token), listener) as running:
      _greet(served, running.url, not os.environ.get(TOKEN) and token)
      if not server.is_loopback(HOST.value):
        print(
          f'# Other machines reach {HOST.value}, and nothing is encrypted: put '
          'a proxy with TLS before it.',
          flush=True,
        )
      running.wait()


if __name__ == '__main__':
  with startup.ended():
    command_line.run(main, 'MODEL')
