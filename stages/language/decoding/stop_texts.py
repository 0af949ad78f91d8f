"""Texts that end a completion, found by its tokens in a compiled loop.

One text can be written by different tokens, and may begin and end within them.
So the automaton of Aho and Corasick (doi:10.1145/360825.360855) reads the bytes
of tokens. Its state is the longest end of a completion with which some text
begins. A table has the next state by state and token. Most tokens lead to the
same states, so the table has a row for each class of tokens that do.
"""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int
import numpy as np

from stages import base


@dataclasses.dataclass(frozen=True, eq=False)
class StopTexts:
  """The automaton of some texts, for the tokens of a vocabulary.

  Attributes:
    class_V: class of each token.
    next_CS: the state after a token of class C, by the state before. Where a
      text ends in that token, S is added to it, the number of states.
    longest: bytes of the longest text.
  """

  class_V: Int[np.ndarray, ' V']
  next_CS: Int[np.ndarray, 'C S']
  longest: int

  def begin(self, completions: base.Completions) -> Int[Array, ' B']:
    """The states after the tokens so far.

    A text that ended in the last token is not reported again. A state depends
    on the last `longest` bytes at most, so only as many tokens are read.
    """
    length_B = completions.mask.sum(1, dtype=jnp.int32)

    def read(i, state_B):
      column_B = length_B - self.longest + i
      at_B1 = jnp.maximum(column_B, 0)[:, None]
      token_B1 = jnp.take_along_axis(completions.action, at_B1, axis=1)
      read_B = self.advance(state_B, token_B1[:, 0])
      return jnp.where(column_B < 0, 0, read_B)

    state_B = jnp.zeros_like(length_B)
    state_B = jax.lax.fori_loop(0, self.longest, read, state_B)
    return state_B % self.next_CS.shape[1]

  def advance(self, state_B, token_B) -> Int[Array, ' B']:
    """The states after one more token of each row."""
    S = self.next_CS.shape[1]
    class_B = jnp.asarray(self.class_V)[token_B]
    return jnp.asarray(self.next_CS)[class_B, state_B % S]

  def after(self, token_T: Sequence[int]) -> int:
    """The state after the tokens of one row, as `begin`, on the host."""
    state, S = 0, self.next_CS.shape[1]
    for token in token_T[-self.longest :]:
      state = int(self.next_CS[self.class_V[token], state]) % S
    return state

  def read(self, state: int, token_T: Sequence[int]) -> tuple[int, int, bool]:
    """Reads tokens of one row on the host, to the first that ends a text.

    Returns:
      The number of tokens that were read, the state after them, and whether a
      text ended.
    """
    S = self.next_CS.shape[1]
    for i, token in enumerate(token_T):
      state = int(self.next_CS[self.class_V[token], state % S])
      if state >= S:
        return i + 1, state, True
    return len(token_T), state, False

  def has_ended(self, state_B):
    """Whether a text ended in the latest token of each row."""
    return state_B >= self.next_CS.shape[1]


def make(texts: Sequence[str], bytes_V: Sequence[bytes | None]) -> StopTexts:
  """The automaton of texts, each of at least one character.

  Args:
    texts: the texts.
    bytes_V: bytes of each token; None for one without, such as a special token,
      which no text reaches across.
  """
  go_SX, is_end_S = _automaton([text.encode() for text in texts])
  V, S = len(bytes_V), len(go_SX)
  state_VS = np.tile(np.arange(S, dtype=np.int32), (V, 1))
  ended_VS = np.zeros((V, S), bool)
  length_V = np.array([len(x or b'') for x in bytes_V])
  for i in range(length_V.max(initial=0)):
    at_N = np.flatnonzero(length_V > i)
    byte_N = np.array([bytes_V[v][i] for v in at_N])
    state_VS[at_N] = go_SX[state_VS[at_N], byte_N[:, None]]
    ended_VS[at_N] |= is_end_S[state_VS[at_N]]
  state_VS[length_V == 0] = 0
  next_CS, class_V = np.unique(
    state_VS + S * ended_VS, axis=0, return_inverse=True
  )
  longest = max(len(text.encode()) for text in texts)
  return StopTexts(
    class_V.reshape(-1).astype(np.int32), next_CS.astype(np.int32), longest
  )


def _automaton(
  texts: Sequence[bytes],
) -> tuple[Int[np.ndarray, 'S 256'], np.ndarray]:
  """The next state by state and byte, and the states in which a text ends.

  A state is a beginning of some text; 0 is the empty one.
  """
  states = [b'']
  for text in texts:
    some = (text[:n] for n in range(1, len(text) + 1))
    states += [x for x in some if x not in states]
  number = {x: i for i, x in enumerate(states)}
  go_SX = np.zeros((len(states), 256), np.int32)
  for i, state in enumerate(states):
    for byte in range(256):
      read = state + bytes([byte])
      # The longest end of what was read that some text begins with.
      ends = (read[n:] for n in range(len(read) + 1))
      go_SX[i, byte] = next(number[x] for x in ends if x in number)
  is_end_S = np.array([x.endswith(tuple(texts)) for x in states])
  return go_SX, is_end_S
