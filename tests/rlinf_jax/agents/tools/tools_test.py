import functools
import time

import pytest

from rlinf_jax.agents import deadline, formats, tool_env, tools
from rlinf_jax.agents.tools import calculator
from rlinf_jax.isolation import pool
import tools_of_mine

SECONDS = 2.0


def test_a_schema_follows_from_types_and_docstring():
  made = tools.tool(tools_of_mine.add).schema['function']
  assert made['name'] == 'add' and made['description'] == 'Adds two numbers.'
  a, b = (made['parameters']['properties'][name] for name in 'ab')
  assert a == {'type': 'integer', 'description': 'The first number.'}
  assert made['parameters']['required'] == ['a'] and b['type'] == 'integer'


def test_functions_that_cannot_be_tools_are_refused():
  with pytest.raises(ValueError, match='untyped cannot be a tool'):
    tools.tool(tools_of_mine.untyped)
  with pytest.raises(ValueError, match='put a function into a module'):
    tools.tool(functools.partial(tools_of_mine.add, 1))


@pytest.mark.parametrize(
  'expression, value',
  [('8347*5921', '49422587'), ('12 * (3 + 4)', '84'), ('7/2', '3.5')],
)
def test_the_calculator_computes(expression, value):
  assert calculator.calculator(expression) == value


@pytest.mark.parametrize(
  'expression',
  [
    '',
    '1/0',
    'x',
    '"a"*3',
    '().__class__',
    '__import__("os")',
    'open("x")',
    '9**9**9',
    '[1,2]',
    '1<2',
    '(' * 300,
    '1+' * 1000 + '1',
  ],
)
def test_the_calculator_does_nothing_else(expression):
  with pytest.raises(Exception):  # noqa: B017 (Any error is one for the model.)
    calculator.calculator(expression)


@pytest.fixture(scope='module')
def made():
  """An environment with a tool that misbehaves, and the calculator."""
  bad = tools.tool(tools_of_mine.misbehave, seconds=SECONDS, processes=1)
  return tool_env.ToolEnv([bad, calculator.calculator], parse=formats.pythonic)


@pytest.fixture
def env(made):
  made.reset({'question': '6*7=', 'answer': '42'})
  return made


def said(step):
  return [message['content'] for message in step.messages]


def test_a_tool_is_called_and_then_the_answer_is_graded(env):
  step = env.step('[calculator(expression="6*7"), misbehave(how="fine")]')
  assert said(step) == ['42', 'I am fine'] and not step.terminated
  assert step.terms == {'tool_used': 1, 'tool_calls': 2, 'tool_errors': 0}
  again = env.step('[calculator(expression="1")]')
  assert again.terms['tool_used'] == 0 and again.reward == 0
  end = env.step(' 42')
  assert end.terminated and end.reward == 1.0


def test_a_wrong_answer_has_no_reward(env):
  end = env.step('43')
  assert end.terminated and end.reward == 0.0


@pytest.mark.parametrize(
  'call, error',
  [
    ('misbehave(how="raise")', 'error: RuntimeError: as told'),
    ('misbehave(how="hang")', f'error: it took more than {SECONDS:g} s'),
    ('misbehave(how="die")', 'error: its process ended'),
    ('misbehave(how="much")', 'error: its result has 1,048,589 bytes, and'),
    ('misbehave(what="raise")', 'error: TypeError'),
    ('misbehave(self=1)', 'error: TypeError'),
    ('calculator(expression="1/0")', 'error: ZeroDivisionError'),
    ('nothing(a=1)', 'error: there is no such tool, only misbehave'),
    ('misbehave(', 'error: write calls as'),
  ],
)
def test_a_failing_call_costs_its_own_turn(env, call, error):
  start = time.perf_counter()
  step = env.step(f'[{call}]')
  assert said(step)[0].startswith(error), said(step)
  assert not step.terminated and step.terms['tool_errors'] == 1
  # The next call of the same tool is answered.
  fine = env.step('[misbehave(how="fine")]')
  assert said(fine) == ['I am fine']
  assert time.perf_counter() - start < 30  # The hanging one would take 60.


def test_episodes_that_end_while_they_wait_take_no_process_along():
  """Their threads are ended, also while they wait for a process."""
  tool = tools.tool(tools_of_mine.misbehave, seconds=0.3, processes=2)
  steps = deadline.Pool(4, 0.1)
  late = steps.map(lambda _: tool.call({'how': 'hang'}), range(4))
  assert [type(x) for x in late] == [deadline.LateError] * 4
  fine = deadline.Pool(4, 30.0).map(lambda how: tool.call({'how': how}), 'abcd')
  assert fine == ['I am a', 'I am b', 'I am c', 'I am d']


def test_an_agent_reasons_and_acts():
  """A conversation in the words of ReAct."""
  env = tool_env.ToolEnv(
    [calculator.calculator, tools_of_mine.add],
    parse=formats.react,
    grade=tool_env.same_react_answer,
    observation='Observation: ',
  )
  env.reset({'question': '6*7=', 'answer': '42'})
  step = env.step('Thought: I compute.\nAction: calculator[6*7]')
  assert said(step) == ['Observation: 42'] and step.terms['tool_errors'] == 0
  step = env.step('Action: add[1]')
  assert said(step) == [
    'Observation: error: add needs its arguments by name: a, b'
  ]
  step = env.step('Action: add\nAction Input: {"a": 40}')
  assert said(step) == ['Observation: 42']
  assert env.step('Thought: 42.\nFinal Answer: 42').reward == 1.0


def test_arguments_that_are_bound_are_not_told():
  tool = tools.tool(tools_of_mine.add, bound={'b': 5})
  assert list(tool.schema['function']['parameters']['properties']) == ['a']
  assert tool.call({'a': 1}) == '6' and tool.call({'a': 1, 'b': 9}) == '6'


def test_calls_of_one_function_share_their_processes():
  one, two = (tools.tool(tools_of_mine.add) for _ in '12')
  assert one.calls is two.calls
  assert isinstance(one.calls, pool.Pool)
