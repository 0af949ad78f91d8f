"""Many episodes at once, of which a tenth hang or raise."""

import functools
import time

import numpy as np
import pytest

import claims
from rlinf_jax.agents import deadline, formats, stepping, tool_env, tools
import tools_of_mine

MANY = claims.some((40, 1000), keep=[40])
BAD = ('hang', 'raise')


def play(make, problems, texts, seconds, num_threads=16):
  """Plays all episodes at once, turn by turn, as the host stage does.

  Returns:
    Their sums of rewards, sums of terms by name, and numbers of failed steps.
  """
  steps = stepping.Steps(make, deadline.Pool(num_threads, seconds))
  rows = range(len(texts))
  reward, failed = np.zeros(len(texts)), np.zeros(len(texts), int)
  terms = {name: np.zeros(len(texts)) for name in make().terms}
  open_ = set(rows)
  for turn in range(max(map(len, texts))):
    now = [i for i in rows if i in open_ and turn < len(texts[i])]
    said = steps([
      stepping.Turn(
        str(i).encode(), problems[i], (tuple(texts[i][: turn + 1]),)
      )
      for i in now
    ], len(now))  # fmt: skip
    for i, answer in zip(now, said, strict=True):
      if isinstance(answer, Exception):
        failed[i] += 1
        open_.remove(i)
        continue
      step = answer.step
      reward[i] += step.reward
      for name, value in step.terms.items():
        terms[name][i] += value
      open_ -= {i} if step.terminated else set()
  assert all(failed[i] for i in open_), 'an episode has not ended'
  return reward, terms, failed


def bad_rows(n):
  """A tenth of the rows, each with how it misbehaves."""
  rng = np.random.default_rng(n)
  chosen = rng.choice(n, n // 10, replace=False).tolist()
  return {row: BAD[k % len(BAD)] for k, row in enumerate(chosen)}


@pytest.mark.slow
@pytest.mark.parametrize('n', MANY)
def test_environments_that_hang_or_raise_lose_their_own_episodes(n):
  bad, texts = bad_rows(n), [['a', 'bc', 'stop'] for _ in range(n)]
  for k, (row, how) in enumerate(bad.items()):
    texts[row][k % 3] = how  # In any turn.
  problems = ['{"question": "7"}'] * n
  start = time.monotonic()
  reward, terms, failed = play(tools_of_mine.Echo, problems, texts, seconds=2.0)
  # Hanging ones would take a minute each.
  assert time.monotonic() - start < 30 + n / 10
  assert failed.tolist() == [int(i in bad) for i in range(n)]
  good = [i for i in range(n) if i not in bad]
  assert reward[good].tolist() == [0.25 + 0.25 + 3.0] * len(good)
  assert terms['heard'][good].tolist() == [1 + 2] * len(good)


@pytest.mark.slow
@pytest.mark.parametrize('n', MANY)
def test_tools_that_hang_or_raise_cost_their_own_turns(n):
  tool = tools.tool(tools_of_mine.misbehave, seconds=2.0, processes=2)
  make = functools.partial(tool_env.ToolEnv, [tool], parse=formats.pythonic)
  bad = bad_rows(n)
  how = [bad.get(i, 'fine') for i in range(n)]
  texts = [[f'[misbehave(how="{x}")]', '1'] for x in how]
  problems = ['{"question": "?", "answer": "1"}'] * n
  # A step waits for a process as well, so its limit is far from the tool's.
  reward, terms, failed = play(make, problems, texts, seconds=600.0)
  assert not failed.any() and reward.tolist() == [1.0] * n
  assert terms['tool_errors'].tolist() == [float(i in bad) for i in range(n)]
  assert terms['tool_used'].tolist() == [float(i not in bad) for i in range(n)]
  assert terms['tool_calls'].sum() == n
