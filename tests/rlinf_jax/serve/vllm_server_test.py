"""A server whose replies vLLM generates, driven by OpenAI's own client."""

import collections
import dataclasses
import pathlib
import time

import jax
import numpy as np
import pytest
from safetensors import numpy

from rlinf_jax.engines import vllm_engine
from rlinf_jax.serve import __main__ as serve
from rlinf_jax.serve import endpoint, server
import served_models
from stages.language import huggingface, sample, tokens
from tests.rlinf_jax.serve import endpoint_test
import vllm_models

pytestmark = vllm_models.marks
LENGTH = 600
LONG = {'temperature': 0, 'max_tokens': LENGTH}  # It repeats itself.


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return served_models.model(tmp_path_factory.mktemp('served'), width=128)


class Spy:
  """Outputs of vLLM for each request, in the order of its steps."""

  def __init__(self):
    self.engines, self.steps = set(), []
    self.ids = collections.defaultdict(list)
    self.logp = collections.defaultdict(list)
    self.kept = {}

  def hear(self, engine, output):
    name, new = output.request_id, output.outputs[0]
    self.engines.add(engine)
    self.steps.append(name)
    self.ids[name] += new.token_ids
    self.logp[name] += new.logprobs.logprobs
    self.kept[name] = output.num_cached_tokens

  def unfinished(self):
    (engine,) = self.engines
    return engine.llm.get_num_unfinished_requests()


@pytest.fixture(scope='module')
def spy():
  said, hear = Spy(), vllm_engine.Engine._hear

  def heard(engine, pending, output):
    said.hear(engine, output)
    hear(engine, pending, output)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(vllm_engine.Engine, '_hear', heard)
    yield said


def bytes_in_jax():
  return sum(x.nbytes for x in jax.live_arrays())


@pytest.fixture(scope='module')
def loaded(folder, spy):
  """A served model, and the bytes of the arrays that JAX holds for it."""
  before = bytes_in_jax()
  served = serve.load(
    folder,
    prompt_length=256,
    response_length=LENGTH,
    engine='vllm',
    max_rows=4,
  )
  yield served, bytes_in_jax() - before
  served.decoder.close()


@pytest.fixture(scope='module')
def served(loaded):
  return loaded[0]


@pytest.fixture(scope='module')
def running(served):
  with server.Server(endpoint.Endpoint(served, endpoint_test.TOKEN)) as running:
    yield running


def wait_until_nothing_runs(spy):
  """vLLM's thread ends a cancelled request at its next step."""
  for _ in range(1200):
    if not spy.unfinished():
      return
    time.sleep(0.05)
  raise AssertionError('A cancelled request still ran after a minute.')


def new_names(spy, number):
  """The last requests, in the order in which they started."""
  return list(spy.ids)[-number:]


@pytest.mark.parametrize('temperature', [1.0, 0.5])
def test_what_is_recorded_is_what_vllm_sampled_at_the_asked_temperature(
  folder, running, served, spy, temperature
):
  session, key = endpoint_test.new_session(running)
  messages, logp = list(endpoint_test.ASK), []
  for question in 'Why?', 'And then?':
    reply = endpoint_test.chat(
      running,
      key,
      messages,
      logprobs=True,
      temperature=temperature,
      max_tokens=12,
      seed=1,  # By another seed, a first reply may end after a word.
    ).choices[0]
    logp += [x.logprob for x in reply.logprobs.content]
    messages += [
      reply.message.model_dump(exclude_none=True),
      {'role': 'user', 'content': question},
    ]
  (x,) = endpoint_test.trajectories(running, session, key)
  own_T = np.array(x['own']) > 0
  names = new_names(spy, 2)
  assert np.array(x['ids'])[own_T].tolist() == sum(map(spy.ids.get, names), [])
  recorded = np.array(x['logp'])[own_T]
  assert recorded.tolist() == logp == sum(map(spy.logp.get, names), [])
  # The full blocks of 32 tokens of the first call, whose last token is not
  # read.
  before = len(x['prompt']) + len(spy.ids[names[0]]) - 1
  assert spy.kept[names[1]] == 32 * (before // 32) > 0
  policy = huggingface.policy(
    folder,
    response_length=len(x['ids']),
    sampling=dataclasses.replace(sample.Sampling(), temperature=temperature),
  )
  prompt = tokens.pad_left([x['prompt']], len(x['prompt']))
  scored = policy.evaluate(
    policy.init(jax.random.key(0)), prompt, np.array([x['ids']])
  )
  vllm_models.assert_close_where_real(
    np.array(x['logp'])[None], scored.logp, own_T[None]
  )


def test_the_weights_are_in_vllm_alone(loaded):
  _, grown = loaded
  assert grown < 1000  # The model has a hundred thousand weights.


def test_a_request_joins_the_one_under_way_and_ends_before_it(running, spy):
  before = len(spy.steps)
  with endpoint_test.chat(running, stream=True, **LONG) as long:
    parts = iter(long)
    while not next(parts).choices[0].delta.content:
      pass
    short = endpoint_test.chat(running, seed=1, max_tokens=5, logprobs=True)
    steps = spy.steps[before:]
    rest = list(parts)
  first, second = new_names(spy, 2)
  assert 0 < len(short.choices[0].logprobs.content) <= 5
  # The short one came while tokens of the long one were before it and after.
  assert steps.index(second) > 0 and len(rest) > 1
  assert spy.steps[::-1].index(first) < spy.steps[::-1].index(second)
  assert len(spy.ids[first]) == LENGTH and rest[-1].choices[0].finish_reason


def test_a_stream_comes_in_parts_and_says_what_was_recorded(
  running, served, spy
):
  session, key = endpoint_test.new_session(running)
  text, logp, parts = '', [], 0
  for event in endpoint_test.chat(
    running, key, stream=True, logprobs=True, **LONG
  ):
    (x,) = event.choices
    text += x.delta.content or ''
    parts += bool(x.delta.content)
    logp += [y.logprob for y in (x.logprobs.content if x.logprobs else [])]
  (row,) = endpoint_test.trajectories(running, session, key)
  (name,) = new_names(spy, 1)
  assert parts > 2 and row['ids'] == spy.ids[name]
  assert row['logp'] == logp == spy.logp[name]
  assert text == served.tokenizer.decode(row['ids'])


def test_a_client_that_leaves_in_mid_stream_frees_its_row(running, spy):
  session, key = endpoint_test.new_session(running)
  with endpoint_test.chat(running, key, stream=True, **LONG) as stream:
    for event in stream:
      if event.choices[0].delta.content:
        break
  wait_until_nothing_runs(spy)
  (name,) = new_names(spy, 1)
  assert 0 < len(spy.ids[name]) < LENGTH
  assert not endpoint_test.trajectories(running, session, key)


def test_a_stop_text_ends_the_row(running, spy):
  session, key = endpoint_test.new_session(running)
  full = endpoint_test.chat(running, **LONG).choices[0].message.content
  stop = full[3:5]
  reply = endpoint_test.chat(running, key, stop=stop, **LONG).choices[0]
  assert reply.message.content == full[: full.index(stop)]
  assert reply.finish_reason == 'stop'
  (row,) = endpoint_test.trajectories(running, session, key)
  both = new_names(spy, 2)
  assert row['ids'] == spy.ids[both[0]][: len(row['ids'])]
  wait_until_nothing_runs(spy)
  assert len(spy.ids[both[1]]) < LENGTH


def test_a_seed_gives_the_same_reply_alone_and_beside_others(running):
  ask = {'seed': 5, 'max_tokens': 10}
  alone = endpoint_test.chat(running, **ask).choices[0].message.content
  several = endpoint_test.chat(running, n=3, **ask).choices
  assert several[0].message.content == alone
  assert len({x.message.content for x in several}) == 3


@pytest.mark.parametrize('value', [np.nan, None])
def test_a_model_without_numbers_or_tensors_is_refused(tmp_path, value):
  path = pathlib.Path(served_models.model(tmp_path, width=128))
  file = path / 'model.safetensors'
  tensors = numpy.load_file(file)
  if value is None:
    del tensors['model.norm.weight']
  else:
    tensors['model.norm.weight'][0] = value
  numpy.save_file(tensors, file)
  message = 'missing model.norm.weight' if value is None else 'NaN or infinite'
  with pytest.raises(ValueError, match=message):
    serve.load(
      str(path), prompt_length=64, response_length=8, engine='vllm', max_rows=4
    )
