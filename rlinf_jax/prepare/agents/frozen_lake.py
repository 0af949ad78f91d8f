"""Walks over a frozen lake in words, for an agent of eight turns and more.

The agent sees the fields next to it, and not the map: `1,2 FHFE` is the row,
the column, and what lies to the left, below, to the right and above: start,
frozen, hole, goal or the edge. A turn is one of four moves. The lake is that of
Gymnasium's FrozenLake-v1, not slippery, of 5 × 5 fields, so that the goal is
eight moves away or more. A walk into a hole ends without reward.
"""

from collections.abc import Mapping, Sequence
import functools
from typing import Any
import zlib

import numpy as np

from rlinf_jax.agents import base, gymnasium_text
from stages import ranges

SIZE = 5
FROZEN = 0.8  # Share of the fields on which one can walk, on average.
ACTIONS = ('left', 'down', 'right', 'up')
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))


class FrozenLake(gymnasium_text.GymnasiumText):
  """FrozenLake-v1 with the map of a problem, `{'map': ['SFHFF', …]}`."""

  def __init__(self):
    super().__init__(
      'FrozenLake-v1',
      actions=ACTIONS,
      describe=self._look,
      make={'is_slippery': False},
    )

  def reset(self, problem: Mapping[str, Any]) -> list[base.Message]:
    self._lake = problem['map']
    return super().reset({'make': {'desc': self._lake}})

  def _look(self, field: int) -> str:
    """The number of a field, and what lies next to it."""
    row, column = divmod(int(field), SIZE)
    near = [(row + down, column + right) for down, right in MOVES]
    letters = [
      self._lake[y][x] if 0 <= y < SIZE and 0 <= x < SIZE else 'E'
      for y, x in near
    ]
    return f'{row},{column} {"".join(letters)}'


def draw(
  rng: np.random.Generator, rows: int, held_out: bool
) -> list[dict[str, list[str]]]:
  """Random maps on which the goal can be reached.

  One map in eight, by a checksum of it, is held out.
  """
  problems = []
  while len(problems) < rows:
    fields = np.where(rng.random((SIZE, SIZE)) < FROZEN, 'F', 'H')
    fields[0, 0], fields[-1, -1] = 'S', 'G'
    lake = [''.join(row) for row in fields.tolist()]
    is_held_out = zlib.crc32(''.join(lake).encode()) % 8 == 0
    if is_held_out == held_out and (0, 0) in distances(tuple(lake)):
      problems.append({'map': lake})
  return problems


@functools.lru_cache(10_000)
def distances(lake: Sequence[str]) -> dict[tuple[int, int], int]:
  """Moves to the goal, from each field that it can be reached from."""
  goal = SIZE - 1, SIZE - 1
  found, last = {goal: 0}, [goal]
  while last:
    now, last = last, []
    for (row, column), (down, right) in (
      (field, move) for field in now for move in MOVES
    ):
      new = row + down, column + right
      inside = all(0 <= x < SIZE for x in new)
      if inside and new not in found and lake[new[0]][new[1]] != 'H':
        found[new] = found[row, column] + 1
        last.append(new)
  return found


def script(
  rng: np.random.Generator,
  problem: Mapping[str, Sequence[str]],
  random_share: ranges.Fraction = 0.5,
  max_turns: ranges.PositiveInt = 14,
) -> list[str]:
  """The turns of a demonstrator, who takes shortest ways and random moves.

  Args:
    rng: draws the moves.
    problem: the problem.
    random_share: probability that a move is a random one.
    max_turns: moves after which it gives up.
  """
  lake = tuple(problem['map'])
  to_goal = distances(lake)
  field, turns = (0, 0), []
  while len(turns) < max_turns and to_goal.get(field):
    ways = [_next(field, move) for move in MOVES]
    best = [
      i for i, x in enumerate(ways) if to_goal.get(x, 99) < to_goal[field]
    ]
    chosen = rng.choice(best)
    if rng.random() < random_share:
      chosen = rng.integers(len(MOVES))
    turns.append(ACTIONS[chosen])
    field = ways[chosen]
  return turns


def _next(field: tuple[int, int], move: tuple[int, int]) -> tuple[int, int]:
  """The field after a move; the edge of the lake holds."""
  row, column = (
    min(max(x + step, 0), SIZE - 1) for x, step in zip(field, move, strict=True)
  )
  return row, column


def corpus() -> Sequence[str]:
  """Texts to train a tokenizer on: moves, and what an agent sees."""
  fields = [f'\n{row},{column} F\n' for row in range(5) for column in range(5)]
  letters = 'abcdefghijklmnopqrstuvwxyz'
  error = f'\nerror: this is no action, write one of {", ".join(ACTIONS)}\n'
  return [*(list(ACTIONS) + fields) * 50, 'S F H G E', letters, error]
