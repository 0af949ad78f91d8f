"""The endpoint of a small model, driven by OpenAI's own client."""

import json
import socket
import urllib.parse

import httpx
import jax
import numpy as np
import openai
import pytest

from rlinf_jax.serve import __main__ as serve
from rlinf_jax.serve import endpoint, server
import served_models
from stages.language import huggingface, tokens

TOKEN = 'a-token-of-the-test'
LENGTH = 24
ASK = [{'role': 'user', 'content': 'What is 6*7?'}]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return served_models.model(tmp_path_factory.mktemp('served'))


@pytest.fixture(scope='module')
def served(folder):
  served = serve.load(folder, prompt_length=256, response_length=LENGTH)
  yield served
  served.decoder.close()


@pytest.fixture(scope='module')
def running(served):
  with server.Server(endpoint.Endpoint(served, TOKEN)) as running:
    yield running


def client(running, key=TOKEN):
  return openai.OpenAI(base_url=running.url, api_key=key, max_retries=0)


def new_session(running):
  """The id and the token of a new session."""
  x = post(running, '/sessions').json()
  return x['id'], x['token']


def post(running, path, key=TOKEN, **body):
  headers = {'authorization': f'Bearer {key}'}
  return httpx.post(running.url + path, headers=headers, timeout=60, **body)


def trajectories(running, session, key=TOKEN):
  answer = httpx.get(
    f'{running.url}/sessions/{session}',
    headers={'authorization': f'Bearer {key}'},
  )
  assert answer.status_code == 200, answer.text
  return answer.json()['trajectories']


def chat(running, key=TOKEN, messages=ASK, **settings):
  settings = {'model': 'model', 'messages': messages, **settings}
  return client(running, key).chat.completions.create(**settings)


def test_recorded_ids_and_log_probabilities_are_those_served_and_scored(
  folder, running, served
):
  session, key = new_session(running)
  messages, logp = list(ASK), []
  for question in 'Why?', 'And then?':
    reply = chat(running, key, messages, logprobs=True).choices[0]
    logp += [x.logprob for x in reply.logprobs.content]
    messages += [
      reply.message.model_dump(exclude_none=True),
      {'role': 'user', 'content': question},
    ]
  (x,) = trajectories(running, session, key)
  assert [p for p, own in zip(x['logp'], x['own'], strict=True) if own] == logp
  # The law: one forward pass over the recorded ids gives these numbers.
  policy = huggingface.policy(folder, response_length=len(x['ids']))
  prompt = tokens.pad_left([x['prompt']], len(x['prompt']))
  scored = policy.evaluate(
    policy.init(jax.random.key(0)), prompt, np.array([x['ids']])
  )
  own_T = np.array(x['own']) > 0
  np.testing.assert_allclose(
    np.asarray(scored.logp[0])[own_T], np.array(x['logp'])[own_T], atol=2e-5
  )
  text = served.tokenizer.decode(x['ids'])
  assert 'user:Why?;assistant:' in text and x['version'] == [0] * len(own_T)


def test_a_seed_gives_the_same_reply_alone_in_a_batch_and_as_a_stream(
  running, served
):
  ask = {'seed': 5, 'logprobs': True}
  alone = chat(running, **ask).choices[0]
  batch = chat(running, n=5, **ask).choices
  assert batch[0].message.content == alone.message.content
  assert len({x.message.content for x in batch}) == 5
  text, logp, reasons = '', [], []
  for event in chat(
    running, stream=True, stream_options={'include_usage': True}, **ask
  ):
    for x in event.choices:
      text += x.delta.content or ''
      logp += [y.logprob for y in (x.logprobs.content if x.logprobs else [])]
      reasons += [x.finish_reason] if x.finish_reason else []
  assert text == alone.message.content
  assert logp == [x.logprob for x in alone.logprobs.content]
  assert reasons == [alone.finish_reason]
  assert event.usage.completion_tokens == len(logp) <= LENGTH
  greedy = {chat(running, temperature=0).choices[0].message.content
            for _ in range(2)}  # fmt: skip
  assert len(greedy) == 1


def test_many_lengths_of_prompts_compile_few_programs(running, served):
  decoder = served.decoder
  for n in range(1, 200, 20):
    messages = [{'role': 'user', 'content': 'x' * n}]
    chat(running, messages=messages, max_tokens=1)
  chat(running, n=3)
  compiled = decoder._start._cache_size() + decoder._advance._cache_size()
  assert compiled <= decoder.num_programs == 12


def test_a_stop_text_ends_the_reply_and_the_recorded_ids(running, served):
  session, key = new_session(running)
  full = chat(running, seed=7).choices[0].message.content
  stop = full[3:5]
  reply = chat(running, key, seed=7, stop=stop).choices[0]
  assert reply.message.content == full[: full.index(stop)]
  assert reply.finish_reason == 'stop'
  (x,) = trajectories(running, session)
  assert served.tokenizer.decode(x['ids']).endswith(stop)
  assert chat(running, max_tokens=2).usage.completion_tokens <= 2
  for name in 'max_tokens', 'max_completion_tokens':
    with pytest.raises(openai.BadRequestError, match=f'at most {LENGTH} tok'):
      chat(running, **{name: LENGTH + 1})


def test_a_session_is_rewarded_and_read_by_its_own_token_alone(running):
  session, key = new_session(running)
  other, other_key = new_session(running)
  chat(running, key)
  path = f'/sessions/{session}'
  assert post(running, f'{path}/reward', key, json={'reward': 0.5}).json() == {
    'id': session,
    'reward': 0.5,
  }
  assert post(running, f'{path}/reward', other_key, json={'reward': 1}
              ).status_code == 404  # fmt: skip
  for bad in (
    '{"reward": NaN}',
    '{"reward": "1"}',
    '{}',
    '[1]',
    '{"reward":true}',
  ):
    assert post(running, f'{path}/reward', key, content=bad).status_code == 400
  assert post(running, '/sessions', key).status_code == 403
  assert trajectories(running, other) == []
  # The server's token names a session by a header.
  chat(running, extra_headers={endpoint.SESSION: other})
  assert len(trajectories(running, other)) == 1
  with pytest.raises(openai.NotFoundError, match='no such session'):
    chat(running, key, extra_headers={endpoint.SESSION: other})


@pytest.mark.parametrize(
  'error, settings, says',
  [
    (openai.AuthenticationError, {'key': 'wrong'}, 'API key is missing or'),
    (openai.NotFoundError, {'model': 'gpt-5'}, "served is 'model', not 'gpt-5"),
    (openai.BadRequestError, {'top_p': 0.5}, "'top_p' may only be 1 here"),
    (openai.BadRequestError, {'temperature': 9}, 'must be 0, or from 0.01'),
    (openai.BadRequestError, {'extra_body': {'best': 1}}, 'not supported'),
    (openai.BadRequestError, {'messages': []}, 'must be a list of messages'),
    (
      openai.BadRequestError,
      {'messages': [{'role': 'user', 'content': 'long ' * 200}]},
      'the limit is 256: shorten',
    ),
  ],
)
def test_a_request_that_is_wrong_is_refused_in_a_sentence(
  running, error, settings, says
):
  with pytest.raises(error) as refused:
    chat(running, **settings)
  assert says in str(refused.value)
  assert TOKEN not in str(refused.value)
  assert chat(running, max_tokens=1).usage.completion_tokens == 1


def test_bodies_that_are_no_requests_are_refused(running):
  path = '/chat/completions'
  for bad in b'{', b'\xff\xfe', b'[]', b'"x"', b'[' * 100_000, b'', b'NaN':
    answer = post(running, path, content=bad)
    assert answer.status_code == 400, bad[:10]
    assert 'not a JSON object' in answer.json()['error']['message']
  for size in endpoint.MAX_BODY + 1, 8 * endpoint.MAX_BODY:
    with pytest.raises(openai.APIStatusError) as refused:
      chat(running, messages=[{'role': 'user', 'content': 'x' * size}])
    assert refused.value.status_code == 413
  # A body without a token is not read at all.
  answer = post(running, path, 'wrong', content=b'{')
  assert answer.status_code == 401
  assert answer.headers['www-authenticate'] == 'Bearer'
  for lost in '/nothing', '/sessions/none':
    answer = post(running, lost)
    assert answer.status_code in (404, 405) and answer.json()['error']
  assert httpx.get(running.url + '/models').status_code == 401
  assert [x.id for x in client(running).models.list()] == ['model']


def test_a_model_is_not_served_beyond_its_positions(folder):
  most = huggingface.load_config(folder).max_positions
  with pytest.raises(ValueError, match=f'{most + 1} positions, and the model'):
    serve.load(folder, prompt_length=most - 9, response_length=10)


def test_noise_and_half_a_request_leave_the_server_up(running):
  where = urllib.parse.urlsplit(running.url)
  for noise in (
    b'\x16\x03\x01\xff\xff',
    b'POST /v1/chat/completions HTTP/1.1\r\n',
  ):
    with socket.create_connection((where.hostname, where.port)) as stranger:
      stranger.sendall(noise)
  assert where.hostname == '127.0.0.1'
  assert chat(running, max_tokens=1).choices


def test_a_client_may_connect_before_the_server_runs(served):
  waiting = server.Server(endpoint.Endpoint(served, TOKEN))
  where = urllib.parse.urlsplit(waiting.url)
  with socket.create_connection((where.hostname, where.port)) as early:
    early.sendall(b'GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n')
    with waiting:
      assert early.recv(100).startswith(b'HTTP/1.1 401')


def test_values_of_json_that_no_client_sends_are_refused(running):
  """Every field with every kind of value: an answer in 4xx or a completion."""
  usual = {'model': 'model', 'messages': ASK, 'max_tokens': 1}
  for name in ('messages', 'tools', 'stop', 'n', 'stream_options', 'seed'):
    for value in (0, -1, 1e400, 'x', [], [0], [None], {}, {'x': 1}, True):
      body = json.dumps(usual | {name: value})
      answer = post(running, '/chat/completions', content=body)
      assert answer.status_code in (200, 400), (name, value, answer.text)
