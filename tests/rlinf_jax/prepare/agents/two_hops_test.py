import numpy as np
import pytest

from rlinf_jax.agents import formats, tool_env
from rlinf_jax.agents.tools import search
from rlinf_jax.prepare.agents import two_hops
from stages.language import tokens


@pytest.fixture(scope='module')
def env(tmp_path_factory):
  folder = two_hops.documents(str(tmp_path_factory.mktemp('run')))
  find = search.folder(folder, results=1, seconds=60.0, processes=1)
  return tool_env.ToolEnv([find], parse=formats.pythonic)


def test_the_encyclopaedia_has_2000_facts_of_names_that_are_not_shared():
  people, firms, towns = (
    set(names) for names in zip(*two_hops.facts(), strict=True)
  )
  assert len(people) == len(firms) == 1000 and len(towns) == 20
  assert len(people | firms | towns) == 2020


def test_people_held_out_are_not_asked_about_in_training():
  rng = np.random.default_rng(0)
  asked = lambda rows, held_out: {
    problem['question'] for problem in two_hops.draw(rng, rows, held_out)
  }
  held_out = asked(two_hops.HELD_OUT, True)
  assert len(held_out) == two_hops.HELD_OUT
  assert not held_out & asked(5000, False)


def test_more_people_held_out_than_there_are_are_refused():
  with pytest.raises(ValueError, match='257 .* 256 people .* to at most'):
    two_hops.draw(np.random.default_rng(0), two_hops.HELD_OUT + 1, True)


def test_two_searches_find_the_answer_and_one_does_not(env):
  """For each person held out, by the words of the demonstrator."""
  rng = np.random.default_rng(0)
  for problem in two_hops.draw(rng, 64, True):
    env.reset(problem)
    first, second, last = two_hops.script(rng, problem, tool_share=1.0)
    said = env.step(first).messages[0]['content']
    firm = said.removeprefix(problem['question'].split()[0] + ': firm ')
    assert problem['answer'] not in said and firm in second
    said = env.step(second).messages[0]['content']
    assert said == f'{firm}: town {problem["answer"]}'
    assert env.step(last).reward == 1.0


def test_a_guess_is_right_once_in_twenty():
  rng = np.random.default_rng(0)
  problems = two_hops.draw(rng, 5000, False)
  right = [two_hops.script(rng, x, 0.0) == [x['answer']] for x in problems]
  assert abs(np.mean(right) - 1 / two_hops.TOWNS) < 0.012  # Four of its errors.


def test_the_tokenizer_makes_a_token_of_each_syllable(tmp_path):
  tokenizer = tokens.train_tokenizer(tmp_path, two_hops.corpus(), 160)
  for name in {name for fact in two_hops.facts() for name in fact}:
    assert len(tokenizer(name)['input_ids']) == 2
