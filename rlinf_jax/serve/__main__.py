"""Serves a model to agents that speak OpenAI's API, and records their calls.

  python -m rlinf_jax.serve /path/to/model

It prints two lines for the shell of the agent: the base URL and the API key.
With --engine=vllm, vLLM generates, and replies join those under way.
The model is a folder in Hugging Face format with a chat template: a model to
train, or the `model` folder of a run.
"""

from collections.abc import Callable
import functools
import importlib.util
import os
import pathlib
import secrets

from absl import flags
import jax

from rlinf_jax import command_line, startup
from rlinf_jax.agents import formats
from rlinf_jax.serve import batches, completions, engine_decoder
from stages.language import huggingface, stops, tokens

FORMATS = {
  'hermes': formats.hermes,
  'llama_json': formats.llama_json,
  'pythonic': formats.pythonic,
}
MAX_ROWS = {'jax': 8, 'vllm': 64}  # Replies decoded at once, by engine.
LONGEST = 1 << 20  # Tokens, of models with the longest contexts.
HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on.')
PORT = flags.DEFINE_integer(
  'port', 8000, 'Port; 0 for one that is free.', 0, 65535
)
RESPONSE_LENGTH = flags.DEFINE_integer(
  'response_length', 256, 'Most tokens of a reply.', 1, LONGEST
)
PROMPT_LENGTH = flags.DEFINE_integer(
  'prompt_length', 2048, 'Most tokens before a reply.', 16, LONGEST
)
FORMAT = flags.DEFINE_enum(
  'tool_format', 'hermes', list(FORMATS), 'How the model writes tool calls.'
)
ENGINE = flags.DEFINE_enum(
  'engine', 'jax', list(MAX_ROWS), 'Engine that generates the replies.'
)
ROWS = flags.DEFINE_integer(
  'max_rows',
  None,
  f'Replies decoded at once; {MAX_ROWS["jax"]} with JAX and '
  f'{MAX_ROWS["vllm"]} with vLLM by default.',
  1,
  1024,
)
TOKEN = 'RLINF_JAX_TOKEN'  # Environment variable; flags are visible to others.


def load(
  model: str,
  *,
  prompt_length: int,
  response_length: int,
  tool_format: str = 'hermes',
  engine: str = 'jax',
  max_rows: int | None = None,
) -> completions.Served:
  """Loads a model and starts its decoder.

  Args:
    model: its folder.
    prompt_length: most tokens of a conversation before a reply.
    response_length: most tokens of a reply.
    tool_format: how the model writes tool calls, of `FORMATS`.
    engine: what generates, of `MAX_ROWS`.
    max_rows: replies decoded at once; that of `MAX_ROWS` if None.

  Raises:
    ImportError: if vLLM is to generate and is not installed.
    ValueError: if there is no such model, it has no chat template or too few
      positions, or vLLM does not support it.
  """
  make = _in_jax if engine == 'jax' else _by_vllm()
  tokenizer = tokens.load_tokenizer(model)
  formats.answer(
    tokenizer,
    [{'role': 'user', 'content': 'x'}],
    chat=True,
    keep_thoughts=True,
  )
  decoder = make(
    model,
    stop=stops.stop_tokens(model),
    prompt_length=prompt_length,
    response_length=response_length,
    max_rows=max_rows or MAX_ROWS[engine],
  )
  name = pathlib.Path(model).resolve().name
  return completions.Served(name, tokenizer, decoder, FORMATS[tool_format])


def _in_jax(model: str, **limits) -> batches.Decoder:
  """A decoder of a model in JAX, with `limits` of it."""
  config = huggingface.load_config(model)
  params = jax.device_put(huggingface.load_params(model, config))
  return batches.Decoder(config, params, **limits)


def _by_vllm() -> Callable[..., engine_decoder.Decoder]:
  """Returns `model, **limits -> decoder` by vLLM, which has started then.

  vLLM reads the weights itself, so that they are in memory once. It is called
  before a tokenizer imports torch: the module of the engine sets variables of
  the environment that torch and vLLM read.
  """
  # The device's memory is for vLLM, and JAX would take most of it at once.
  os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
  from rlinf_jax.engines import vllm

  def make(model: str, *, response_length: int, max_rows: int, **limits):
    config = huggingface.load_config(model)
    batches.check_positions(config, limits['prompt_length'], response_length)
    huggingface.check_params(model, config)
    policy = huggingface.policy(
      model,
      response_length=response_length,
      engine=functools.partial(
        vllm.engine,
        max_num_seqs=max_rows,
        # The prefix cache keeps whole blocks of tokens.
        block_size=32 if jax.default_backend() == 'cpu' else 16,
      ),
    )
    decoder = engine_decoder.Decoder(
      policy,
      response_length=response_length,
      max_rows=max_rows,
      **limits,
    )
    decoder.try_out()
    return decoder

  return make


def _greet(served: completions.Served, url: str, drawn: str | bool):
  """Prints the URL and the model, and a token that was drawn."""
  print(f'export OPENAI_BASE_URL={url}')
  if drawn:
    print(f'export OPENAI_API_KEY={drawn}')
  print(
    f'# Serves the model {served.name!r}. {served.decoder.about()}', flush=True
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
      engine=ENGINE.value,
      max_rows=ROWS.value,
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
