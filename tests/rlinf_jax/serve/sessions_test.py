"""Agents with tools, before a scripted model."""

import json

import httpx
import openai
import pytest

from rlinf_jax.serve import completions, endpoint, server
import served_models
from stages.language import tokens

TOKEN = 'a-token-of-the-test'
ASK = [{'role': 'user', 'content': 'What is 6*7?'}]
ADD = {
  'type': 'function',
  'function': {'name': 'add', 'parameters': {'type': 'object'}},
}
CALL = (
  'Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
)


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  folder = served_models.model(tmp_path_factory.mktemp('served'))
  return tokens.load_tokenizer(folder)


@pytest.fixture
def serve(tokenizer, request):
  """`texts -> client, endpoint, decoder`: a server of a scripted model."""

  def start(*texts, **settings):
    decoder = served_models.ScriptedDecoder(tokenizer, texts, **settings)
    app = endpoint.Endpoint(
      completions.Served('model', tokenizer, decoder), TOKEN
    )
    running = server.Server(app)
    running.__enter__()
    request.addfinalizer(lambda: running.__exit__())
    session = app.sessions.create()
    client = openai.OpenAI(
      base_url=running.url, api_key=session.token, max_retries=0
    )
    return client, session, decoder

  return start


def chat(client, messages=ASK, **settings):
  return client.chat.completions.create(
    model='model', messages=messages, **settings
  )


def turn(tokenizer, text):
  return (*served_models.letters(tokenizer, text), tokenizer.eos_token_id)


def test_a_tool_is_called_and_what_the_model_wrote_is_not_tokenized_again(
  serve, tokenizer
):
  client, session, _ = serve(CALL, 'calculator')
  reply = chat(client, tools=[ADD]).choices[0]
  assert reply.finish_reason == 'tool_calls'
  assert reply.message.content == 'Let me see.'
  (call,) = reply.message.tool_calls
  assert call.function.name == 'add'
  assert json.loads(call.function.arguments) == {'a': 1}
  result = {'role': 'tool', 'tool_call_id': call.id, 'content': 'is two'}
  # As frameworks send it back: with fields of their own, arguments rewritten.
  said = reply.message.model_dump()
  said['tool_calls'][0]['function']['arguments'] = '{"a":1}'
  answer = chat(client, [*ASK, said, result], tools=[ADD])
  assert answer.choices[0].message.content == 'calculator'
  (x,) = session.trajectories()
  first, last = turn(tokenizer, CALL), turn(tokenizer, 'calculator')
  read = tuple(tokenizer('tool:is two;assistant:')['input_ids'])
  assert x.ids == first + read + last
  assert x.own == (1,) * len(first) + (0,) * len(read) + (1,) * len(last)
  # Tokenized again, the words would be fewer tokens.
  assert tokenizer.decode(x.prompt).startswith('add;user:What')
  assert set(x.version) == {0, 3} and not x.truncated
  assert answer.usage.prompt_tokens == len(x.prompt + first + read)


def test_streamed_calls_are_those_of_a_whole_reply(serve):
  client, session, _ = serve(CALL, 'no <tool_call>{', 'plain')
  parts = [x.choices[0] for x in chat(client, tools=[ADD], stream=True)]
  calls = [c for x in parts for c in x.delta.tool_calls or ()]
  assert [(c.index, c.function.name) for c in calls] == [(0, 'add')]
  assert parts[-1].finish_reason == 'tool_calls'
  assert ''.join(x.delta.content or '' for x in parts) == 'Let me see.'
  # A call that cannot be read is text; without tools, every call is.
  broken = chat(client, tools=[ADD]).choices[0]
  assert broken.message.content == 'no <tool_call>{'
  assert broken.finish_reason == 'stop'
  assert chat(client).choices[0].message.tool_calls is None
  assert len(session.trajectories()) == 3


def test_an_edited_history_begins_a_new_trajectory(serve):
  client, session, _ = serve('one', 'two', 'three')
  said = {
    'role': 'assistant',
    'content': chat(client).choices[0].message.content,
  }
  why = {'role': 'user', 'content': 'Why?'}
  header = client.chat.completions.with_raw_response.create
  go_on = header(model='model', messages=[*ASK, said, why])
  assert go_on.headers['x-trajectory'] == 'continued'
  edited = {**said, 'content': 'One!'}
  other = header(model='model', messages=[*ASK, edited, why])
  assert other.headers['x-trajectory'] == 'new'
  first, second = session.trajectories()
  assert sum(first.own) == len('one') + len('two') + 2
  assert sum(second.own) == len('three') + 1
  assert first.prompt != second.prompt


@pytest.mark.parametrize('thinks', [False, True])
def test_thoughts_that_the_template_drops_begin_a_new_trajectory(
  serve, tokenizer, monkeypatch, thinks
):
  dropping = served_models.TEMPLATE.replace(
    '{{ m.content }}', "{{ m.content.split('</think>')[-1] }}"
  )
  assert dropping != served_models.TEMPLATE
  monkeypatch.setattr(tokenizer, 'chat_template', dropping)
  client, session, _ = serve('<think>I see.</think>42' if thinks else '42', '7')
  reply = chat(client).choices[0].message.content
  said = [{'role': 'assistant', 'content': reply}, *ASK]
  chat(client, [*ASK, *said])
  trajectories = session.trajectories()
  assert len(trajectories) == 1 + thinks
  assert ('see' in tokenizer.decode(trajectories[-1].prompt)) is False


def test_who_leaves_a_stream_ends_its_decoding_and_records_nothing(serve):
  client, session, decoder = serve('x' * 400, 'done', seconds_per_token=0.01)
  with chat(client, stream=True) as stream:
    for event in stream:
      if event.choices[0].delta.content:
        break
  assert decoder.cancelled.wait(5.0)
  assert session.trajectories() == []
  assert chat(client).choices[0].message.content == 'done'


def test_who_leaves_before_a_whole_reply_ends_its_decoding_too(serve):
  client, session, decoder = serve('x' * 400, 'done', seconds_per_token=0.01)
  with pytest.raises(openai.APITimeoutError):
    chat(client, timeout=httpx.Timeout(0.3))
  assert decoder.cancelled.wait(5.0)
  assert session.trajectories() == []
  assert chat(client).choices[0].message.content == 'done'


def test_a_reply_that_the_limit_cuts_is_recorded_as_truncated(serve, tokenizer):
  client, session, _ = serve('abcdef', 'g')
  reply = chat(client, max_completion_tokens=3).choices[0]
  assert (reply.message.content, reply.finish_reason) == ('abc', 'length')
  assert session.trajectories()[0].truncated
  said = {'role': 'assistant', 'content': 'abc'}
  chat(client, [*ASK, said, {'role': 'user', 'content': 'h'}])
  (x,) = session.trajectories()
  # The end token that the model did not write is read, not learned from.
  assert x.ids[3] == tokenizer.eos_token_id and x.own[3] == 0
