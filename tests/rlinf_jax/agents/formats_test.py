import pytest

from rlinf_jax.agents import formats, tools
from rlinf_jax.prepare.agents import products
from stages.language import tokens
import tools_of_mine

# As Qwen2.5 renders tools and their results, in short.
TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}{% if message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope='module')
def chat_tokenizer(tmp_path_factory):
  folder = tmp_path_factory.mktemp('chat')
  tokenizer = tokens.train_tokenizer(folder, products.corpus(50), 128)
  tokenizer.chat_template = TEMPLATE
  tokenizer.eos_token = '<|im_end|>'
  return tokenizer


@pytest.mark.parametrize(
  'text, calls',
  [
    ('347', []),
    ('[add(a=1, b=-2)]', [('add', {'a': 1, 'b': -2})]),
    (' [f(x="]"), g()]', [('f', {'x': ']'}), ('g', {})]),
    ('[]', []),
  ],
)
def test_pythonic_calls_are_read(text, calls):
  assert formats.pythonic(text) == calls


@pytest.mark.parametrize(
  'text',
  [
    '[add(1, 2)]',
    '[add(a=1',
    '[1, 2]',
    '[add(a=open("x"))]',
    '[a.b(c=1)]',
    '[' * 5000,
    '[x for x in y]',
    '[add(**{"a": 1})]',
    '[add(a={1, 2})]',  # JSON, in which a client reads it, has no sets.
    '[add(a=b"1")]',
    '[add(a=1e999)]',
  ],
)
def test_broken_pythonic_calls_are_refused(text):
  with pytest.raises(formats.FormatError, match='write calls as'):
    formats.pythonic(text)


def test_hermes_calls_are_read():
  text = (
    'I add. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    '<tool_call>{"name": "now"}</tool_call>'
  )
  assert formats.hermes(text) == [('add', {'a': 1}), ('now', {})]
  assert formats.hermes('The sum is {"a": 1}.') == []


@pytest.mark.parametrize(
  'call', ['{', '[]', '{"name": 1}', '{"name": "f", "arguments": "x"}', '']
)
def test_broken_hermes_calls_are_refused(call):
  with pytest.raises(formats.FormatError, match='write a call as'):
    formats.hermes(f'<tool_call>{call}</tool_call>')


def test_calls_of_llama_3_1_are_read():
  text = '{"name": "add", "parameters": {"a": 1}}'
  assert formats.llama_json(text) == [('add', {'a': 1})]
  assert formats.llama_json(f'<|python_tag|>{text}\n') == [('add', {'a': 1})]
  assert formats.llama_json('The sum is {"a": 1}.') == []
  for broken in (text[:-1], '{}', '{"name": "f", "parameters": [1]}'):
    with pytest.raises(formats.FormatError, match='"parameters"'):
      formats.llama_json(broken)


CODE = 'x = [1,\n  2]\nprint(x)'


@pytest.mark.parametrize(
  'text, calls',
  [
    ('Thought: I look.\nAction: search[owl food]', [('search', 'owl food')]),
    ('Action 2: search[a [b] c]', [('search', 'a [b] c')]),
    ('Action: search\nAction Input: owl food', [('search', 'owl food')]),
    ('Action: add\nAction Input: {"a": 1}', [('add', {'a': 1})]),
    ('Action: add[{"a": 1, "b": 2}]', [('add', {'a': 1, 'b': 2})]),
    ('Action: add[12]', [('add', '12')]),
    ('Action: a[1]\nObservation: x\nAction: b[2]', [('b', '2')]),
    ('Action: a[1]\nI wait for [x]', [('a', '1')]),
    ('Action: run[x = [1,\n  2]\nprint(x)]\nObs', [('run', CODE)]),
    ('Action: run\nAction Input: x = [1,\n  2]\nprint(x)', [('run', CODE)]),
    ('Action: a\nAction Input: b\n\nI wait.\nFinal Answer: c', [('a', 'b')]),
    ('Action: a\nAction Input: b\nObservation: c', [('a', 'b')]),
    ('Action: a\nAction Input: {\n"b":\n\n1}\nNow.', [('a', {'b': 1})]),
    ('Action: a[{"b": 1} or 2]', [('a', '{"b": 1} or 2')]),
    ('Action: Finish[two\nmice]', []),
    ('Action: Finish\nmice', []),
    ('Thought: done.\nAction: Finish[mice]', []),
    ('I know.\nFinal Answer: mice', []),
    ('The action: none.', []),
  ],
)
def test_react_calls_are_read(text, calls):
  assert formats.react(text) == calls


@pytest.mark.parametrize(
  'action',
  [
    *('look for owls', 'search', 'search[a', '[a]', '', 'se arch[a]'),
    *('search[a\nb', 'search[a\nb] or c', 'a[1]\nAction Input: b', 'a[\n]]'),
  ],
)
def test_broken_react_calls_are_refused(action):
  with pytest.raises(formats.FormatError, match='write a call as Action'):
    formats.react(f'Thought: x\nAction: {action}')


@pytest.mark.parametrize(
  'text', ['Finish[mice]', 'So.\nFinal Answer: mice \n', 'mice']
)
def test_the_answer_of_react_is_found(text):
  assert formats.react_answer(text) == 'mice'


def test_turns_and_answers_are_the_chat_template(chat_tokenizer):
  """Prompt, turn, end token and answer are the text of the whole template."""
  schema = tools.tool(tools_of_mine.add).schema
  before = [{'role': 'user', 'content': '3*4='}]
  said = [{'role': 'tool', 'name': 'add', 'content': '12'}]
  call = {'role': 'assistant', 'content': '[add(a=3)]'}
  prompt = formats.prompt(chat_tokenizer, before, chat=True, tools=[schema])
  answer = formats.answer(chat_tokenizer, said, chat=True)
  whole = chat_tokenizer.apply_chat_template(
    [*before, call, *said],
    tools=[schema],
    tokenize=False,
    add_generation_prompt=True,
  )
  assert prompt + call['content'] + chat_tokenizer.eos_token + answer == whole
  assert '"The first number."' in prompt and '<tool_response>' in answer


def test_a_template_that_drops_thoughts_is_refused_unless_they_may_stay(
  chat_tokenizer, monkeypatch
):
  dropping = TEMPLATE.replace(
    '{{ message.content }}<|im_end|>',
    "{{ message.content.split('</think>')[-1] }}<|im_end|>",
  )
  said = [{'role': 'user', 'content': 'higher'}]
  usual = formats.answer(chat_tokenizer, said, chat=True)
  monkeypatch.setattr(chat_tokenizer, 'chat_template', dropping)
  with pytest.raises(
    ValueError, match='before messages of user.*keep_thoughts'
  ):
    formats.answer(chat_tokenizer, said, chat=True)
  kept = formats.answer(chat_tokenizer, said, chat=True, keep_thoughts=True)
  assert kept == usual


def test_without_a_template_contents_follow_one_another(chat_tokenizer):
  messages = [{'role': 'user', 'content': '3*4='}]
  assert formats.prompt(chat_tokenizer, messages, chat=False) == '3*4='
  assert formats.answer(chat_tokenizer, messages, chat=False) == '\n3*4=\n'
  parts = [{'type': 'text', 'text': text} for text in ('3*', '4=')]
  calling = {'role': 'assistant', 'content': None, 'tool_calls': [{}]}
  messages = [calling, {'role': 'user', 'content': parts}]
  assert formats.prompt(chat_tokenizer, messages, chat=False) == '3*4='
  assert formats.answer(chat_tokenizer, messages, chat=False) == '\n 3*4=\n'


def test_a_template_with_another_end_is_refused(chat_tokenizer, monkeypatch):
  monkeypatch.setattr(chat_tokenizer, 'chat_template', '{{ messages }}!')
  with pytest.raises(ValueError, match='does not end a turn'):
    formats.answer(chat_tokenizer, [], chat=True)
  monkeypatch.setattr(chat_tokenizer, 'chat_template', None)
  with pytest.raises(ValueError, match='has no chat template'):
    formats.prompt(chat_tokenizer, [], chat=True)
