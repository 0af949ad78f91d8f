"""Requests to vLLM, and the completions that have come of them."""

from collections.abc import Callable, Sequence, Set
from concurrent import futures
import dataclasses
from typing import Any, NamedTuple

from stages.language.decoding import stop_texts as stop_texts_lib
from stages.models.files import naming

Heard = Callable[[int, Sequence[int], Sequence[float]], None]


class Completion(NamedTuple):
  """The completion of one prompt.

  Attributes:
    token: token ids, including the end token.
    logp: log-probability of each under the sampling distribution.
    ended: whether it ended with an end token, not by the length limit.
    kept: tokens of the prompt whose keys and values vLLM had kept.
  """

  token: Sequence[int]
  logp: Sequence[float]
  ended: bool
  kept: int = 0


class Request(NamedTuple):
  """Prompts to complete with given parameters.

  Attributes:
    params: parameters of the model; None for those that vLLM has read itself
      (`vllm_start.Settings.loads`).
    names: the checkpoint tensor of each parameter.
    prompts: token ids.
    sampling: for each prompt, arguments of vLLM's `SamplingParams`.
    max_model_len: maximum tokens of a prompt and its completion together.
    should_stop: whether to stop early, given the indices of prompts that have
      ended; unfinished completions are then returned as they are. None to
      finish all.
    heard: called on the engine's thread with the index of a prompt and its new
      tokens and their log-probabilities, as they come; None to hear of nothing
      before the end.
    stop_texts: texts that end a completion; None for none.
    states: states of their automaton after what was sampled before; () for
      completions that begin.
  """

  params: Any
  names: dict[str, naming.Tensor]
  prompts: Sequence[Sequence[int]]
  sampling: Sequence[dict[str, Any]]
  max_model_len: int
  should_stop: Callable[[Set[int]], bool] | None = None
  heard: Heard | None = None
  stop_texts: stop_texts_lib.StopTexts | None = None
  states: Sequence[int] = ()


@dataclasses.dataclass(eq=False)
class Pending:
  """A request under way.

  Attributes:
    request: the request.
    future: resolves to its completions.
    finished: finished completions by the index of their prompt.
    index_of: indices of unfinished prompts by vLLM's request id.
    tokens: ids and log-probabilities that vLLM has returned of each prompt.
    states: state of the automaton of texts, of each prompt.
  """

  request: Request
  future: futures.Future
  finished: dict[int, Completion] = dataclasses.field(default_factory=dict)
  index_of: dict[str, int] = dataclasses.field(default_factory=dict)
  tokens: dict[int, tuple[list[int], list[float]]] = dataclasses.field(
    default_factory=dict
  )

  states: dict[int, int] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    self.states |= enumerate(self.request.states)

  def add(self, i: int, token: Sequence[int], logp: Sequence[float]) -> bool:
    """Adds new tokens of prompt `i`; returns whether a text has ended.

    Those after a text are left out.
    """
    count, at_text, texts = len(token), False, self.request.stop_texts
    if texts:
      count, self.states[i], at_text = texts.read(self.states.get(i, 0), token)
    own = self.tokens.setdefault(i, ([], []))
    for mine, new in zip(own, (token, logp), strict=True):
      mine.extend(new[:count])
    if self.request.heard:
      self.request.heard(i, token[:count], logp[:count])
    return at_text

  def completion(self, i: int, ended: bool, kept: int = 0) -> Completion:
    """The completion of prompt `i` so far."""
    token, logp = self.tokens.get(i, ((), ()))
    return Completion(tuple(token), tuple(logp), ended, kept)
