"""Lengths of completions that a plan is made for are read, or refused."""

import jax
import jax.numpy as jnp
import pytest

from planner.costs import work
from planner.costs.decoding import decode
from planner.counting import count
from planner.ir import flow as flow_lib
from rlinf_jax.planning import completion_lengths
import stages


def test_lengths_do_not_tell_when_enough_rows_have_ended():
  """As with partial rollouts, where generation is a barrier."""

  def draw(alive_B):
    """A token a turn of every row, until half of them have ended."""
    return jax.lax.while_loop(
      lambda now: (now[0] < 6) & (now[1].sum() > len(alive_B) // 2),
      lambda now: (now[0] + 1, now[1] & (now[0] < jnp.arange(len(alive_B)))),
      (0, alive_B),
    )

  generate = stages.Stage(draw, 'generate', 'batch')
  recorded = flow_lib.trace(
    lambda state, x: (state, generate(x)), (), jnp.ones(8, bool)
  )
  works = count.of_flow(recorded)
  assert works['generate'].full_batch.turns == 6
  with pytest.raises(ValueError, match='generate ends when enough rows have'):
    completion_lengths.with_lengths(works, [1, 2, 1])


def test_nor_do_they_in_slots():
  step = work.StageWork(work.NONE)
  slots = decode.DecodeWork([6], step, max_rows=4, all_rows=8)
  with pytest.raises(ValueError, match='generate ends when enough rows have'):
    completion_lengths.with_lengths({'generate': slots}, [1, 2, 1])
  # Without them, every row is assumed to have the maximum.
  assert '6 tokens' in completion_lengths.with_lengths({'x': slots}, None)[1]


@pytest.mark.parametrize('text', ['[]', '[1.5]', '{"a": 1}', '[0]', 'not'])
def test_lengths_that_are_none_are_refused(tmp_path, text):
  file = tmp_path / 'lengths.json'
  file.write_text(text)
  with pytest.raises(ValueError, match='JSON list of whole numbers'):
    completion_lengths.read(file)
  file.write_text('[3, 1]')
  assert completion_lengths.read(file) == [3, 1]
