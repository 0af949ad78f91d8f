"""Sources of problems for text environments, and of episodes to imitate."""

from collections.abc import Callable, Sequence
import json
from typing import Any

import numpy as np

from rlinf_jax.agents import base as agents_base
from rlinf_jax.agents import formats, stepping
from rlinf_jax.data import files, text_arrays
from rlinf_jax.data import prompts as prompts_lib
from stages import base, ranges
from stages.language import tokens

HELD_OUT_SEED = 2**20

Draw = Callable[[np.random.Generator, int, bool], Sequence[Any]]
"""`rng, rows, held_out -> problems`, each of which JSON can write."""

Script = Callable[[np.random.Generator, Any], Sequence[str]]
"""`rng, problem -> texts`: the turns of a demonstrator, in all of its roles."""


def problems(
  checkpoint: str,
  make: agents_base.Make,
  *,
  draw: Draw,
  batch_size: ranges.PositiveInt,
  prompt_length: ranges.PositiveInt,
  held_out: ranges.HeldOut = 512,
  held_out_batch: ranges.PositiveInt = 256,
  problem_bytes: ranges.PositiveInt = 256,
  chat: bool = True,
) -> base.Source:
  """A source of problems, with the prompts that their environments begin with.

  A batch depends on the seed and its number only. With roles, a problem is a
  row for each of them, and evaluations count the rows of the first.

  Args:
    checkpoint: folder of the model whose tokenizer to use.
    make: makes one environment.
    draw: `rng, rows, held_out -> problems`; those held out are never among the
      others.
    batch_size: problems a batch.
    prompt_length: tokens that prompts are padded to.
    held_out: number of problems held out for evaluation.
    held_out_batch: number of them in a batch.
    problem_bytes: bytes that the JSON of a problem may have.
    chat: whether to render prompts by the chat template, as in `formats`.
  """
  encode = _Encoder(checkpoint, make, prompt_length, problem_bytes, chat)
  return encode.source(
    lambda rng: encode.batch(draw(rng, batch_size, False)),
    draw,
    held_out,
    held_out_batch,
  )


def examples(
  checkpoint: str,
  make: agents_base.Make,
  *,
  draw: Draw,
  script: Script,
  batch_size: ranges.PositiveInt,
  prompt_length: ranges.PositiveInt,
  response_length: ranges.PositiveInt,
  held_out: ranges.HeldOut = 512,
  held_out_batch: ranges.PositiveInt = 256,
  problem_bytes: ranges.PositiveInt = 256,
  chat: bool = True,
) -> base.Source:
  """A source of episodes that a script plays, for supervised learning.

  The loss is on the script's turns alone, not on what environments say. With
  roles, an episode is a row for each of them.

  Args:
    checkpoint: as in `problems`.
    make: likewise.
    draw: likewise.
    script: `rng, problem -> texts`: the turns to imitate.
    batch_size: episodes a batch.
    prompt_length: as in `problems`.
    response_length: tokens that conversations are padded to.
    held_out: as in `problems`.
    held_out_batch: likewise.
    problem_bytes: likewise.
    chat: likewise.
  """
  encode = _Encoder(checkpoint, make, prompt_length, problem_bytes, chat)

  def batch(rng) -> base.Example:
    drawn = draw(rng, batch_size, False)
    rows = [
      row
      for x in drawn
      for row in encode.episode(x, script(rng, x), response_length)
    ]
    action_BT, mask_BT = (np.stack(x) for x in zip(*rows, strict=True))
    return base.Example(encode.batch(drawn).prompt, action_BT, mask_BT)

  return encode.source(batch, draw, held_out, held_out_batch)


def opening(make: agents_base.Make) -> prompts_lib.Opening:
  """Lets a text environment begin the conversation of each question.

  It is for `data.questions.questions`: the environment's problem is a mapping
  with the 'question' and the 'answer' of a row, and with its 'columns' if
  `questions.questions` names any.

  Args:
    make: makes one environment.

  Raises:
    ValueError: for an environment with roles.
  """
  env = make()
  if agents_base.roles(env):
    raise ValueError(
      f'{type(env).__name__} has the roles {[*agents_base.roles(env)]}, and '
      'questions of files are asked of one: give its problems by `problems`.'
    )

  def texts(tokenizer, rows, *, chat, system_prompt, template) -> list[str]:
    if system_prompt is not None or template != '{prompt}':
      raise ValueError(
        'A text environment writes the messages of its prompt, and questions '
        'got a system prompt or a template besides: give them to the '
        'environment, as to tool_env.ToolEnv.'
      )
    prompts = [env.reset(_problem(row)) for row in rows]
    tools = agents_base.tools(env)
    texts = [
      formats.prompt(tokenizer, messages, chat=chat, tools=tools)
      for messages in prompts
    ]
    if chat and tools:
      formats.check_tools(tokenizer, texts, tools)
    return texts

  def references(rows) -> text_arrays.Texts:
    return text_arrays.Texts([json.dumps(_problem(row)) for row in rows])

  return prompts_lib.Opening(texts, references)


def _problem(row: files.Row) -> dict[str, Any]:
  """The problem of a question.

  Raises:
    ValueError: for messages or pictures, which environments do not read.
  """
  if not isinstance(row.prompt, str) or row.images:
    raise ValueError(
      f'{row.where} has messages or pictures, and a text environment begins '
      'the conversation itself: give questions as text.'
    )
  columns = {'columns': json.loads(row.columns)} if row.columns else {}
  return {'question': row.prompt, 'answer': row.answer, **columns}


class _Encoder:
  """Encodes problems and episodes; see `problems` for the arguments."""

  def __init__(self, checkpoint, make, prompt_length, problem_bytes, chat):
    self._tokenizer = tokens.load_tokenizer(checkpoint)
    self._make, self._chat = make, chat
    self._prompt_length, self._bytes = prompt_length, problem_bytes

  def batch(self, problems: Sequence[Any]) -> base.Problem:
    """Prompts of each role, and the problems as bytes of JSON."""
    env = self._make()
    R = max(1, len(agents_base.roles(env)))
    texts = [text for x in problems for text in self._prompts(env, x)]
    prompt = tokens.encode_prompts(
      self._tokenizer, texts, self._prompt_length, templated=self._chat
    )
    return base.Problem(prompt, np.repeat(self._packed(problems), R, axis=0))

  def _prompts(self, env: agents_base.TextEnv, problem: Any) -> list[str]:
    return [
      formats.prompt(
        self._tokenizer,
        messages,
        chat=self._chat,
        tools=agents_base.tools(env),
        has_turn=i == 0,
      )
      for i, messages in enumerate(agents_base.prompts(env, problem))
    ]

  def _packed(self, problems: Sequence[Any]) -> np.ndarray:
    rows = [json.dumps(problem) for problem in problems]
    longest = max(len(row.encode()) for row in rows)
    if longest > self._bytes:
      raise ValueError(
        f'A problem has {longest} bytes as JSON and the limit is '
        f'{self._bytes}: raise problem_bytes.'
      )
    return text_arrays.pack(rows, self._bytes)

  def episode(self, problem: Any, texts: Sequence[str], T: int):
    """For each role, tokens [T] and a mask that is 1 on the script's."""
    env = self._make()
    episode = stepping.begin(env, json.dumps(problem))
    rows = [([], []) for _ in episode.prompts]
    for i, text in enumerate(texts):
      turn = [*self._ids(text), self._tokenizer.eos_token_id]
      _extend(rows[episode.speaker], turn, 1.0)
      answer, episode = episode.step(text)
      if answer.is_last or i == len(texts) - 1:
        break
      said = formats.reply(
        self._tokenizer,
        answer.before,
        answer.step.messages,
        chat=self._chat,
        tools=agents_base.tools(env),
        keep_thoughts=True,  # Demonstrators have what thoughts they write.
      )
      _extend(rows[answer.reader], self._ids(said), 0.0)
    longest = max(len(row) for row, _ in rows)
    if longest > T:
      raise ValueError(
        f'The episode of {problem!r} has {longest} tokens and the limit is '
        f'{T}: raise response_length.'
      )
    return [
      (_padded(row, T, np.int32), _padded(own, T, np.float32))
      for row, own in rows
    ]

  def _ids(self, text: str) -> list[int]:
    return tokens.continue_with(self._tokenizer, text)

  def source(self, make_batch, draw: Draw, rows: int, size: int) -> base.Source:
    """A source of `make_batch(rng)`, with held-out problems."""
    if rows % size:
      raise ValueError(
        f'{rows} held-out problems cannot be cut into batches of {size}: make '
        'held_out a multiple of held_out_batch.'
      )

    def init(seed):
      return {'seed': np.array(seed), 'batch': np.array(0)}

    def advance(state, metrics):
      del metrics  # There is no curriculum.
      rng = np.random.default_rng([int(state['seed']), int(state['batch'])])
      # NumPy returns a scalar, not an array, for a sum of 0-d arrays.
      batch = np.asarray(state['batch'] + 1)
      return {**state, 'batch': batch}, make_batch(rng)

    def batches():
      drawn = draw(np.random.default_rng(HELD_OUT_SEED), rows, True)
      parts = [drawn[i : i + size] for i in range(0, rows, size)]
      R = len(agents_base.roles(self._make()))
      if not R:
        return [self.batch(part) for part in parts]
      weight_B = (np.arange(size * R) % R == 0).astype(np.float32)
      return [self.batch(part)._replace(weight=weight_B) for part in parts]

    return base.Source(
      init, advance, batches, lambda *x: tokens.decode(self._tokenizer, *x)
    )


def _extend(row: tuple[list, list], ids: Sequence[int], own: float):
  """Appends tokens to those of a role, and whether they are its own."""
  row[0].extend(ids)
  row[1].extend([own] * len(ids))


def _padded(row: Sequence, T: int, dtype) -> np.ndarray:
  return np.array([*row, *[0] * (T - len(row))], dtype)
