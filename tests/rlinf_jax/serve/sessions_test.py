"""Agents with tools, before a scripted model."""

import gc
import json
import time
import tracemalloc

import httpx
import openai
import pytest

from rlinf_jax.agents import replies
from rlinf_jax.serve import completions, endpoint, server, sessions
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
  client, session, decoder = serve('x' * 400, 'done', seconds_per_token=0.1)
  with chat(client, stream=True) as stream:
    for event in stream:
      if event.choices[0].delta.content:
        break
  assert decoder.cancelled.wait(60)
  assert session.trajectories() == []
  assert chat(client).choices[0].message.content == 'done'


def test_who_leaves_before_a_whole_reply_ends_its_decoding_too(serve):
  client, session, decoder = serve('x' * 400, 'done', seconds_per_token=0.1)
  with pytest.raises(openai.APITimeoutError):
    chat(client, timeout=httpx.Timeout(2.0))
  assert decoder.cancelled.wait(60)
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


def test_calls_that_have_ended_are_not_kept_to_be_cancelled(serve):
  client, session, _ = serve(*['one'] * 6)
  for _ in range(3):
    chat(client)
  for _ in chat(client, stream=True):
    pass
  chat(client, n=2)
  deadline = time.monotonic() + 60
  while session._cancels and time.monotonic() < deadline:
    time.sleep(0.01)
  assert session._cancels == set()


def test_a_reply_that_was_continued_may_be_continued_otherwise(serve):
  client, session, _ = serve('one', 'two', 'three', 'four')
  said = chat(client).choices[0].message.model_dump()
  messages = [*ASK, said, {'role': 'user', 'content': 'Why?'}]
  said = chat(client, messages).choices[0].message.model_dump()
  chat(client, [*messages, said, {'role': 'user', 'content': 'So?'}])
  (x,) = session.trajectories()
  chat(client, [*ASK, messages[1], {'role': 'user', 'content': 'How?'}])
  first, other = session.trajectories()
  assert first == x and other.prompt == x.prompt
  n = len('one') + 1
  assert other.ids[:n] == x.ids[:n] and other.logp[:n] == x.logp[:n]
  assert sum(other.own) == n + len('four') + 1


def test_the_memory_of_a_session_grows_with_its_ids_not_with_its_calls_too():
  per_call, text = 64, 'some words ' * 40

  def used(num_calls):
    session, messages, parent = sessions.Session(), list(ASK), None
    x = sessions.Trajectory((1, 2))
    for i in range(num_calls):
      x = x.wrote([i] * per_call, [-0.5] * per_call, i, False)
      reply = {'role': 'assistant', 'content': f'{i} {text}'}
      session.record(sessions.Start(x, parent), messages, [], reply, x)
      parent = session._replies[-1]
      messages = [*messages, reply, {'role': 'user', 'content': f'{i} {text}'}]
    del messages, reply
    gc.collect()
    assert session.trajectories() == [x]
    return tracemalloc.get_traced_memory()[0]

  tracemalloc.start()
  few, many = used(20), used(80)
  tracemalloc.stop()
  # Twice what is linear; what each call keeps in full would grow 16-fold.
  assert many < 8 * few


@pytest.mark.parametrize('end', ['</answer>', ' x', '7'])
def test_the_ids_up_to_a_stop_text_are_found_in_few_looks(tokenizer, end):
  class Counting:
    looks = 0

    def decode(self, ids, **kwargs):
      self.looks += 1
      return tokenizer.decode(ids, **kwargs)

  ids = tokenizer('What is 6*7? ' * 40 + end + ' and more')['input_ids']
  counting = Counting()
  found = completions._shortest(counting, ids, [end])
  assert found == next(
    n
    for n in range(1, len(ids) + 1)
    if replies.text(tokenizer, ids[:n], [end]).is_stopped
  )
  assert counting.looks <= len(ids).bit_length() + 1


def test_sessions_of_a_batch_are_not_dropped_for_newer_ones(monkeypatch):
  monkeypatch.setattr(sessions, 'MAX_SESSIONS', 4)
  all_sessions = sessions.Sessions()
  clients = [all_sessions.create() for _ in range(3)]
  batch = [all_sessions.create(i, 1.0, False) for i in range(9)]
  clients += [all_sessions.create() for _ in range(3)]
  admitted = [all_sessions.of_token(x.token) for x in clients]
  assert admitted == [None, None, *clients[2:]]
  assert [all_sessions.find(x.id) for x in batch] == batch
  assert [all_sessions.of_token(x.token) for x in batch] == batch
  for session in (*batch, *clients):
    all_sessions.remove(session)
  assert not all_sessions._old and not all_sessions._by_token


@pytest.mark.parametrize('number', ['1' + '0' * 400, 'NaN', '1e999', 'true'])
def test_numbers_out_of_range_are_refused(serve, number):
  client, session, _ = serve('one')
  headers = {'authorization': f'Bearer {session.token}'}
  chat_body = json.dumps({'model': 'model', 'messages': ASK})
  for path, body in (
    ('chat/completions', f'{chat_body[:-1]}, "temperature": {number}}}'),
    (f'sessions/{session.id}/reward', f'{{"reward": {number}}}'),
  ):
    url = f'{client.base_url}{path}'
    assert httpx.post(url, headers=headers, content=body).status_code == 400
  assert session.reward is None


def test_a_call_copies_the_ids_of_one_conversation(
  serve, tokenizer, monkeypatch
):
  """And not those of each reply that it has had: their sum is quadratic."""
  client, session, _ = serve('one', 'two', 'three')
  messages = list(ASK)
  for _ in range(3):
    messages += [chat(client, messages).choices[0].message.model_dump(), *ASK]
  copied, trajectory = [], sessions._Reply.trajectory

  def noted(reply):
    copied.append(reply)
    return trajectory(reply)

  monkeypatch.setattr(sessions._Reply, 'trajectory', noted)
  assert session.start(tokenizer, messages, []).parent is copied[0]
  assert len(copied) == 1


SAID = {'role': 'assistant', 'content': 'x'}


@pytest.mark.parametrize(
  'fields, says',
  [
    ({'messages': [SAID | {'reasoning_content': 'so'}]}, 'reasoning_content'),
    ({'messages': [SAID | {'function_call': {'name': 'f'}}]}, 'function_call'),
    ({'stream_options': {'include_usage': 'no'}}, 'true or false'),
    ({'stream_options': {'usage': True}}, 'include_usage alone'),
    ({'\ud800': 1}, 'UTF-8'),
    ({'messages': [{'role': 'user', 'content': '\ud800'}]}, 'UTF-8'),
  ],
)
def test_what_would_be_ignored_or_is_no_text_is_refused(serve, fields, says):
  client, session, _ = serve('one')
  answer = httpx.post(
    f'{client.base_url}chat/completions',
    headers={'authorization': f'Bearer {session.token}'},
    content=json.dumps({'model': 'model', 'messages': ASK} | fields),
  )
  assert answer.status_code == 400, answer.text
  assert says in answer.json()['error']['message']


def test_a_message_is_sent_back_with_its_empty_fields(serve):
  client, session, _ = serve('one', 'two')
  said = chat(client).choices[0].message.model_dump()  # Such as `audio`: None.
  chat(client, [*ASK, said | {'annotations': []}, *ASK])
  assert len(session.trajectories()) == 1
