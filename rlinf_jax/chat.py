"""A conversation with a model in the terminal.

  python -m rlinf_jax.chat /path/to/model
  python -m rlinf_jax.chat /path/to/model --adapter runs/lora/model

The model is a folder in Hugging Face format with a chat template: a model to
train, or the `model` folder of a run. That of a run with LoRA is an adapter of
the model that the run was given, unless it was merged. A line is a message; an
empty line or the end of the input ends the conversation.
"""

from collections.abc import Iterable, Iterator, Sequence
import math
import sys

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from rlinf_jax import command_line, startup
from rlinf_jax.data import chat_template
from stages import base
from stages.language import huggingface, sample, tokens
from stages.models import lora

LONGEST = 1 << 17  # Tokens of an answer.
ADAPTER = flags.DEFINE_string(
  'adapter', None, "Folder of an adapter of the model, in PEFT's format."
)
SYSTEM = flags.DEFINE_string('system', None, 'System message.')
LENGTH = flags.DEFINE_integer(
  'length', 256, 'Most tokens of an answer.', 1, LONGEST
)
TEMPERATURE = flags.DEFINE_float(
  'temperature', 0.0, 'Temperature; 0 takes the likeliest token.', 0.0, 1e3
)
flags.register_validator(TEMPERATURE, math.isfinite, 'It must be a number.')
SEED = flags.DEFINE_integer('seed', 0, 'Seed of sampling.', 0, 2**63 - 1)
STEP = 128  # Prompts are padded to multiples, so that few lengths compile.


class TooLongError(ValueError):
  """A conversation is too long for the model; the message says by how much."""


class Chat:
  """A model that answers conversations.

  Attributes:
    tokenizer: of the model.
  """

  def __init__(
    self,
    model: str,
    adapter: str | None = None,
    *,
    length: int,
    temperature: float = 0.0,
  ):
    """Loads a model.

    Args:
      model: folder in Hugging Face format.
      adapter: folder of an adapter of the model, in PEFT's format.
      length: most tokens of an answer.
      temperature: of sampling; 0 for the likeliest token.

    Raises:
      ValueError: if there is no such model or adapter, or the model has no
        chat template that works, or no more positions than an answer takes.
    """
    self.tokenizer = tokens.load_tokenizer(model)
    if not self.tokenizer.chat_template:
      raise ValueError(
        f'The tokenizer of {model} has no chat template: give the folder of an '
        'instruct model.'
      )
    self._text([{'role': 'user', 'content': 'x'}])  # Refused before weights.
    most = huggingface.load_config(model).max_positions
    self._room = math.inf if most is None else most - length
    if self._room <= 0:
      raise ValueError(
        f'An answer of up to {length} tokens leaves none for a question: the '
        f'model has {most} positions (max_position_embeddings in its config'
        f'.json). Give a smaller --length, such as {max(1, most // 2)}.'
      )
    self._policy = huggingface.policy(
      model,
      response_length=length,
      sampling=sample.Sampling(temperature=temperature or 1.0),
      lora=lora.Lora(adapter=adapter),
    )
    self._params = self._policy.init(jax.random.key(0))
    self._act = jax.jit(self._policy.act, static_argnames='greedy')
    self._greedy = not temperature

  def answer(self, messages: Sequence[dict], key: jax.Array) -> str:
    """The model's next message.

    Args:
      messages: the conversation so far, as chat templates take it.
      key: of the sampling.

    Raises:
      TooLongError: if the model has no positions for it and an answer.
    """
    text = self._text(messages)
    ids = self.tokenizer(text, add_special_tokens=False)['input_ids']
    if len(ids) > self._room:
      raise TooLongError(
        f'The conversation has {len(ids)} tokens, and beside an answer the '
        f'model reads at most {self._room}: say less, give a smaller --length, '
        'or start a new conversation.'
      )
    length = min(-(-len(ids) // STEP) * STEP, self._room)
    prompt = tokens.pad_left([ids], length)
    keys = jax.random.split(key, 1)
    x: base.Experience = self._act(
      self._params, jax.tree.map(jnp.asarray, prompt), keys, greedy=self._greedy
    )
    action, mask = np.asarray(x.action[0]), np.asarray(x.mask[0])
    return self.tokenizer.decode(
      action[mask > 0], skip_special_tokens=True
    ).strip()

  def _text(self, messages: Sequence[dict]) -> str:
    return chat_template.render(
      self.tokenizer, messages, 'these messages', add_generation_prompt=True
    )


def converse(
  chat: Chat, lines: Iterable[str], system: str | None, key: jax.Array
) -> Iterator[str]:
  """Yields an answer to each line, until one is empty.

  A line with characters that the tokenizer cannot encode does not reach the
  model: its answer says which they are. Nor does one for which the model lacks
  positions.
  """
  messages = [{'role': 'system', 'content': system}] if system else []
  for n, line in enumerate(lines):
    if not line.strip():
      return
    ids = chat.tokenizer(line, add_special_tokens=False)['input_ids']
    if lost := tokens.lost_characters(chat.tokenizer, line.strip(), ids):
      yield (
        f'(The tokenizer of this model cannot encode {sorted(lost)}: write '
        'without these characters.)'
      )
      continue
    messages.append({'role': 'user', 'content': line.strip()})
    try:
      text = chat.answer(messages, jax.random.fold_in(key, n))
    except TooLongError as error:
      messages.pop()
      yield f'({error})'
      continue
    messages.append({'role': 'assistant', 'content': text})
    yield text


def _lines() -> Iterator[str]:
  """Lines of the terminal, with a prompt if it is one."""
  while True:
    if sys.stdin.isatty():
      print('> ', end='', flush=True)
    line = sys.stdin.readline()
    if not line:
      return
    yield line


def main(model: str):
  chat = Chat(
    model,
    ADAPTER.value,
    length=LENGTH.value,
    temperature=TEMPERATURE.value,
  )
  key = sample.key(SEED.value)
  for text in converse(chat, _lines(), SYSTEM.value, key):
    print(text, flush=True)


if __name__ == '__main__':
  with startup.ended():
    command_line.run(main, 'MODEL')
