"""Rollouts by agents that speak OpenAI's API, for training on what they do.

A server in this process stands before the policy. Each row of a batch is a
session of its own, in which an agent works on the row's problem. The row is the
conversation that the session recorded: its ids are those that were served.
"""

from collections.abc import Callable, Sequence
import concurrent.futures
import functools
import json
import sys
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlinf_jax.agents import base as agents_base
from rlinf_jax.agents import deadline, formats
from rlinf_jax.data import text_arrays
from rlinf_jax.serve import (
  batches,
  completions,
  endpoint,
  engine_decoder,
  server,
  sessions,
)
import stages
from stages import base, ranges
from stages.language import (
  conversation,
  huggingface,
  policy_stages,
  stops,
  tokens,
)

MODEL = 'policy'  # Name of the model, as agents say it.
TERMS = ('turns', 'unused_trajectories')

Agent = Callable[[str, str, Any], float | None]
"""`base_url, api_key, problem -> reward`; None where it told the endpoint."""


class Agents(NamedTuple):
  """An agent, and the limits of its sessions; see `agents`."""

  checkpoint: str
  agent: Agent
  response_length: int
  call_prompt_length: int
  call_length: int
  timeout: float
  num_threads: int
  parse: Callable[[str], list[formats.ToolCall]]


def agents(
  checkpoint: str,
  agent: Agent,
  *,
  response_length: ranges.PositiveInt,
  call_prompt_length: ranges.PositiveInt,
  call_length: ranges.PositiveInt,
  timeout: ranges.PositiveFloat = 60.0,
  num_threads: ranges.PositiveInt = 16,
  parse: Callable[[str], list[formats.ToolCall]] = formats.hermes,
) -> Agents:
  """An agent for `converse`.

  An agent that raises or is late loses its own row, which has no reward, is
  masked from every loss and counts in `env_failed`.

  Args:
    checkpoint: folder of the model, for its tokenizer with a chat template.
    agent: the agent, `base_url, api_key, problem -> reward`.
    response_length: tokens of a row, that of the policy; conversations are cut
      there, and count as truncated.
    call_prompt_length: most tokens that one call may read.
    call_length: most tokens of one reply.
    timeout: seconds that an agent may take for a problem.
    num_threads: agents at once, and replies decoded at once.
    parse: `text -> calls`: how the model writes tool calls, as in `formats`.
  """
  return Agents(
    checkpoint,
    agent,
    response_length,
    call_prompt_length,
    call_length,
    timeout,
    num_threads,
    parse,
  )


def converse(
  policy: base.Policy,
  name: str,
  *,
  group_size: int = 1,
  greedy: bool = False,
  agents: Agents,
) -> Callable:
  """Returns `Version, problem, keys -> problem, Experience` of agents.

  It takes the place of `stages.language.conversation.converse`, whose `Episode`
  it returns as the answer of the problem. What an agent asks for of sampling is
  overruled: the policy is trained on the distribution that it is scored under.

  A row is the last trajectory of its session. Its prompt is the beginning that
  the rows of a group share; tokens after that are masked from every loss unless
  the policy sampled them.

  Args:
    policy: the language model.
    name: name of the stage.
    group_size: adjacent rows of one problem.
    greedy: whether to take the likeliest tokens.
    agents: the agent and its limits.

  Raises:
    ValueError: for a policy that decodes in slots, reads pictures or replays
      routing.
  """
  if not policy.can_take_turns:
    raise ValueError(
      'The endpoint of agents has no slots of its own and records no routing: '
      'leave out slots and replay_routing, and use a language model that reads '
      'text alone.'
    )
  temperature = 0.0 if greedy else policy.sampling.temperature
  pool = deadline.Pool(agents.num_threads, agents.timeout)

  def run(actor: base.Version, problem: base.Problem, key_B):
    row_B = text_arrays.unpack(problem.answer)
    problems = [json.loads(text) for text in row_B]
    bits = jnp.asarray(jax.random.key_data(key_B))
    keys = [jax.random.wrap_key_data(row) for row in bits]
    served = _served(agents, policy)
    result = served.submit(
      actor, agents.agent, pool, problems, keys, temperature
    )
    return stages.Deferred(
      result,
      functools.partial(_rows, agents.response_length, group_size, problem),
    )

  def out_shapes(actor: base.Version, problem: base.Problem, key_B):
    del actor
    return jax.eval_shape(
      lambda problem: _empty(problem, agents.response_length, jnp), problem
    )

  stage = stages.Stage(
    run,
    name,
    unbatched=(0,),
    group_size=group_size,
    host=True,
    out_shapes=out_shapes,
    asynchronous=True,
    engine=_engine(policy, agents, group_size, greedy),
    # In JAX, the endpoint computes in the type of the checkpoint.
    rounds=policy_stages.rounds(policy) if policy.out_shapes else {},
  )

  def rollout(actor: base.Version, problem: base.Problem, key_B):
    x, episode = stage(actor, problem, key_B)
    return problem._replace(answer=episode), x

  return rollout


def _engine(policy: base.Policy, agents: Agents, group_size: int, greedy: bool):
  """The cost of an engine's rollouts; None where JAX generates."""
  if policy.out_shapes is None:
    return None

  def equivalent(actor: base.Version, problem: base.Problem, key_B):
    x = policy.engine.equivalent(
      actor.params,
      problem.prompt,
      key_B,
      group_size=group_size,
      greedy=greedy,
    )
    _, episode = _empty(problem, agents.response_length, jnp)
    return x, episode

  return policy.engine._replace(equivalent=equivalent)


class Outcome(NamedTuple):
  """Result of a session.

  Attributes:
    trajectories: what was recorded.
    reward: of the agent; None where it failed.
  """

  trajectories: list[sessions.Trajectory]
  reward: float | None


class _Served:
  """A server before the policy."""

  def __init__(self, agents: Agents, policy: base.Policy):
    tokenizer = tokens.load_tokenizer(agents.checkpoint)
    limits = {
      'stop': stops.stop_tokens(agents.checkpoint),
      'prompt_length': agents.call_prompt_length,
      'response_length': agents.call_length,
      'max_rows': agents.num_threads,
    }
    self._takes_adapters = policy.out_shapes is not None
    if policy.out_shapes is not None:
      self._decoder = engine_decoder.Decoder(policy, **limits)
    else:
      config = huggingface.load_config(agents.checkpoint)
      self._decoder = batches.Decoder(
        config, None, **limits, sampling=policy.sampling
      )
    self._endpoint = endpoint.Endpoint(
      completions.Served(MODEL, tokenizer, self._decoder, agents.parse)
    )
    self._server = server.Server(self._endpoint)
    self._server.__enter__()
    # Parameters of one version serve at a time.
    self._executor = concurrent.futures.ThreadPoolExecutor(1, 'agents')
    self._has_failed = False

  def submit(self, *args) -> concurrent.futures.Future:
    """A future of the outcomes of problems, in their order."""
    return self._executor.submit(self._run, *args)

  def _run(
    self, actor: base.Version, agent, pool, problems, keys, temperature
  ) -> list[Outcome]:
    if base.FROZEN in actor.params and not self._takes_adapters:
      raise ValueError(
        'In JAX, the endpoint of agents serves whole weights, and these have '
        'adapters: generate with vLLM, or leave out lora.'
      )
    self._decoder.update(actor.params, int(actor.step))
    own = [
      self._endpoint.sessions.create(key, temperature, False) for key in keys
    ]

    def work(row):
      session, problem = row
      reward = agent(self._server.url, session.token, problem)
      return float(session.reward if reward is None else reward)

    rows = list(zip(own, problems, strict=True))
    try:
      rewards = [self._checked(x) for x in pool.map(work, rows)]
    finally:
      for session in own:
        self._endpoint.sessions.remove(session)
      self._decoder.drain()
      # From here on, their place may reuse or release these parameters.
      self._decoder.update(None, 0)
    return [
      Outcome(session.trajectories(), reward)
      for session, reward in zip(own, rewards, strict=True)
    ]

  def _checked(self, reward: float | Exception) -> float | None:
    """The reward; None for an agent that failed, of which the first is told."""
    if isinstance(reward, float) and agents_base.is_finite(reward):
      return reward
    if not self._has_failed:
      self._has_failed = True
      print(
        'An agent failed, which leaves its row out of the loss '
        f'({type(reward).__name__}: {reward}).',
        file=sys.stderr,
        flush=True,
      )
    return None


_all_served: dict[Any, _Served] = {}
_lock = threading.Lock()


def _served(agents: Agents, policy: base.Policy) -> _Served:
  """The server of a model, which training and evaluation share."""
  key = (
    agents._replace(agent=None, timeout=0.0, response_length=0),
    policy.sampling if policy.out_shapes is None else policy.resume,
  )
  with _lock:
    if key not in _all_served:
      _all_served[key] = _Served(agents, policy)
    return _all_served[key]


def _empty(problem: base.Problem, T: int, xp: Any):
  """Experience and episodes in which every array but the problem is zero."""
  B = problem.prompt.token.shape[0]
  zeros = lambda *shape, dtype=xp.float32: xp.zeros(shape, dtype)
  x = base.Experience(
    obs=base.Prompt(*(xp.zeros(a.shape, a.dtype) for a in problem.prompt)),
    action=zeros(B, T, dtype=xp.int32),
    logp=zeros(B, T),
    mask=zeros(B, T),
    truncated=zeros(B),
    version=zeros(B, T, dtype=xp.int32),
    env_failed=zeros(B),
  )
  terms = {name: zeros(B) for name in TERMS}
  return x, conversation.Episode(problem.answer, zeros(B), zeros(B), terms)


def _rows(
  T: int,
  group_size: int,
  problem: base.Problem,
  outcomes: Sequence[Outcome],
) -> tuple[base.Experience, conversation.Episode]:
  """The arrays of finished sessions, rows cut after T tokens."""
  x, episode = _empty(problem, T, np)
  for first in range(0, len(outcomes), group_size):
    group = range(first, first + group_size)
    # An agent that failed may have begun otherwise than the others.
    last = [
      outcomes[i].trajectories[-1:] if outcomes[i].reward is not None else []
      for i in group
    ]
    shared = shared_prefix([row.prompt for rows in last for row in rows])
    shared = shared[: problem.prompt.token.shape[1]]
    for i, rows in zip(group, last, strict=True):
      _put_prompt(x.obs, i, shared, problem.prompt)
      episode.terms['unused_trajectories'][i] = max(
        0, len(outcomes[i].trajectories) - 1
      )
      failed = outcomes[i].reward is None or (bool(rows) and not shared)
      x.env_failed[i] = failed
      if not failed:
        episode.reward[i] = outcomes[i].reward
        for row in rows:
          _put_row(x, i, row, len(shared))
          episode.terms['turns'][i] = num_turns(row)
  episode.truncated[:] = x.truncated
  return x, episode


def shared_prefix(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
  """The longest beginning that all rows have; () without rows."""
  shared = []
  for ids in zip(*rows, strict=False):
    if len(set(ids)) > 1:
      break
    shared.append(ids[0])
  return tuple(shared)


def num_turns(row: sessions.Trajectory) -> int:
  """The number of runs of the model's own ids."""
  before = (0, *row.own[:-1])
  return sum(own > last for own, last in zip(row.own, before, strict=True))


def _put_prompt(obs: base.Prompt, i: int, ids, instead: base.Prompt):
  """Writes the prompt of row `i`; that of the problem where there is none."""
  if not ids:
    obs.token[i], obs.mask[i] = instead.token[i], instead.mask[i]
    return
  obs.token[i, -len(ids) :], obs.mask[i, -len(ids) :] = ids, 1


def _put_row(x: base.Experience, i: int, row: sessions.Trajectory, start: int):
  """Writes a trajectory behind its first `start` ids, which are the prompt."""
  T = x.mask.shape[1]
  rest = row.prompt[start:]
  ids = (*rest, *row.ids)[:T]
  m, n = min(len(rest), T), len(ids)
  x.action[i, :n] = ids
  x.mask[i, m:n] = row.own[: n - m]
  x.logp[i, m:n] = row.logp[: n - m]
  x.version[i, m:n] = row.version[: n - m]
  x.truncated[i] = row.truncated or len(rest) + len(row.ids) > T
