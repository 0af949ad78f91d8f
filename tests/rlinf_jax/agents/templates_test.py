"""Conversations in pieces, against the chat templates of published models.

TRL's package holds these templates as they were published.
"""

import functools
import importlib.util
import pathlib

import pytest

from rlinf_jax.agents import formats, tools
from stages.language import tokens
import tools_of_mine

# Without importing it, which takes seconds.
TRL = importlib.util.find_spec('trl')

CHATML = ('<|im_end|>', '<|im_start|>', '<think>', '</think>')
LLAMA = (
  '<|eot_id|>',
  '<|begin_of_text|>',
  '<|start_header_id|>',
  '<|end_header_id|>',
)
SPECIAL = {
  'qwen2_5': CHATML,
  'qwen3': CHATML,
  'qwen3_instruct_2507': CHATML,
  'llama3_1': LLAMA,
  'llama3_2': LLAMA,
}


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  """Returns a tokenizer with the template and the special tokens of a model."""
  printable = ''.join(map(chr, range(32, 127)))
  letters = [f'{c}\n' for c in printable] + ['<tool_response> assistant user']

  @functools.cache
  def make(name):
    folder = tmp_path_factory.mktemp(name)
    made = tokens.train_tokenizer(folder, letters, 256)
    end, *others = SPECIAL[name]
    made.add_special_tokens({'eos_token': end, 'bos_token': others[0]})
    made.add_tokens(others, special_tokens=True)
    folder = pathlib.Path(TRL.submodule_search_locations[0])
    path = folder / 'chat_templates' / f'{name}.jinja'
    made.chat_template = path.read_text()
    return made

  return make


def user(text):
  return {'role': 'user', 'content': text}


def result(text, name='add'):
  return {'role': 'tool', 'name': name, 'content': text}


def call(a):
  """A message with a call of `tools_of_mine.add`, as frameworks write it."""
  function = {'name': 'add', 'arguments': {'a': a}}
  calls = [{'type': 'function', 'id': 'x', 'function': function}]
  return {'role': 'assistant', 'content': '', 'tool_calls': calls}


def written(name, a):
  """That call as the model writes it."""
  if name.startswith('llama'):
    return f'{{"name": "add", "parameters": {{"a": {a}}}}}'
  call = f'{{"name": "add", "arguments": {{"a": {a}}}}}'
  return f'<tool_call>\n{call}\n</tool_call>'


def pieces(tok, prompt, turns, schemas=(), **kwargs):
  """Ids of a prompt, and of turns each with what is said after it."""
  text = formats.prompt(tok, prompt, chat=True, tools=schemas)
  ids = tok(text, add_special_tokens=False)['input_ids']
  for turn, said in turns:
    ids += tok(turn, add_special_tokens=False)['input_ids']
    ids.append(tok.eos_token_id)
    text = formats.answer(tok, said, chat=True, **kwargs)
    ids += tok(text, add_special_tokens=False)['input_ids']
  return ids


def whole(tok, messages, schemas=()):
  """Ids of a whole conversation, by `transformers` alone."""
  return tok.apply_chat_template(
    messages,
    tools=list(schemas) or None,
    add_generation_prompt=True,
    tokenize=True,
    return_dict=True,
  )['input_ids']


@pytest.mark.parametrize(
  'system', [[], [{'role': 'system', 'content': 'Add.'}]]
)
@pytest.mark.parametrize('name', SPECIAL)
def test_tool_calls_in_pieces_are_the_whole_conversation(
  name, system, tokenizer
):
  tok, schemas = tokenizer(name), [tools.tool(tools_of_mine.add).schema]
  prompt = [*system, user('1+2+3?')]
  turns = [(written(name, a), [result(str(a + 2))]) for a in (1, 3)]
  messages = [*prompt, call(1), result('3'), call(3), result('5')]
  got = pieces(tok, prompt, turns, schemas)
  assert got == whole(tok, messages, schemas)
  reader = formats.llama_json if name.startswith('llama') else formats.hermes
  assert reader(turns[0][0]) == [('add', {'a': 1})]


@pytest.mark.parametrize('name', SPECIAL)
def test_messages_of_a_user_in_pieces_are_the_whole_conversation(
  name, tokenizer
):
  tok, prompt = tokenizer(name), [user('Guess.')]
  said = [('50', [user('higher')]), ('75', [user('lower'), user('Again?')])]
  messages = [*prompt]
  for turn, answers in said:
    messages += [{'role': 'assistant', 'content': turn}, *answers]
  assert pieces(tok, prompt, said, keep_thoughts=True) == whole(tok, messages)


def test_several_results_at_once_are_the_whole_conversation(tokenizer):
  tok, results = tokenizer('qwen2_5'), [result('3'), result('5')]
  both = call(1)
  both['tool_calls'] += call(3)['tool_calls']
  turn = f'{written("qwen2_5", 1)}\n{written("qwen2_5", 3)}'
  prompt = [user('1+2, 3+2?')]
  got = pieces(tok, prompt, [(turn, results)])
  assert got == whole(tok, [*prompt, both, *results])


def test_thoughts_stay_between_calls_of_tools(tokenizer):
  tok, prompt = tokenizer('qwen3'), [user('1+2?')]
  turn = f'<think>\nI add.\n</think>\n\n{written("qwen3", 1)}'
  message = call(1) | {'content': '<think>\nI add.\n</think>\n\n'}
  got = pieces(tok, prompt, [(turn, [result('3')])])
  assert got == whole(tok, [*prompt, message, result('3')])


def test_a_template_that_drops_thoughts_is_refused_unless_they_may_stay(
  tokenizer,
):
  tok, prompt = tokenizer('qwen3'), [user('Guess.')]
  thought = '<think>\nThe middle.\n</think>\n\n'
  turns = [(f'{thought}50', [user('higher')])]
  with pytest.raises(ValueError, match='drops the thoughts.*keep_thoughts'):
    pieces(tok, prompt, turns)
  kept = tok.decode(pieces(tok, prompt, turns, keep_thoughts=True))
  message = {'role': 'assistant', 'content': turns[0][0]}
  messages = [*prompt, message, *turns[0][1]]
  rewritten = tok.decode(whole(tok, messages))
  assert thought in kept and kept.replace(thought, '') == rewritten
  # Templates that keep what was written are used as they are.
  for name in ('qwen2_5', 'qwen3_instruct_2507', 'llama3_1'):
    pieces(tokenizer(name), prompt, turns)


@pytest.mark.parametrize('name', SPECIAL)
def test_a_role_that_hears_first_reads_the_whole_conversation(name, tokenizer):
  tok, before = tokenizer(name), [{'role': 'system', 'content': 'Judge.'}]
  said = [user('1+2=3')]
  text = formats.prompt(tok, before, chat=True, has_turn=False)
  text += formats.opening(tok, before, said, chat=True)
  ids = tok(text, add_special_tokens=False)['input_ids']
  assert ids == whole(tok, [*before, *said])
