"""The stage that rewards completions by a sum of functions."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent import futures
import functools
import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np

from rlinf_jax.data import text_arrays
from rlinf_jax.rewards import base as rewards_base
from rlinf_jax.rewards import final_answer, first_failure, functions, model
import stages
from stages import base
from stages.language import tokens, verifiers

FAILED = verifiers.FAILED


def verify(
  checkpoint: str,
  *,
  rewards: Sequence[
    rewards_base.Reward | rewards_base.Batched | model.RewardModel
  ]
  | None = None,
  weights: Sequence[float] | None = None,
) -> stages.Stage | verifiers.LearnedVerifier:
  """A stage `reference, action, mask -> Verdict` that adds up rewards.

    R = Σᵢ wᵢ rᵢ

  With reward models it is a `verifiers.LearnedVerifier`.

  Each rᵢ is logged by the name of its function, and so is the share of
  completions on which some function failed; it gives 0 to those. A completion
  is correct where the first reward is above 1/2.

  Args:
    checkpoint: folder of the model whose tokenizer to decode with.
    rewards: functions of a `Completion`, and reward models; by default, whether
      the final answer is right. Calls of an `async` function wait at the same
      time. `pool.isolated` gives a function limits of time and memory.
    weights: the weight of each; 1 by default.

  Raises:
    ValueError: for weights that do not fit the rewards, or names that are not
      different; by the stage, where a `Batched` reward does not give one number
      for each completion.
  """
  tokenizer = tokens.load_tokenizer(checkpoint)
  rewards = [functions.correct()] if rewards is None else list(rewards)
  weights = [1.0] * len(rewards) if weights is None else list(weights)
  if not rewards or len(rewards) != len(weights):
    raise ValueError(
      f'There are {len(rewards)} rewards and {len(weights)} weights: give at '
      'least one reward, and a weight for each (REWARDS and WEIGHTS in gin).'
    )
  is_learned = [isinstance(reward, model.RewardModel) for reward in rewards]
  terms = [
    reward if learned else _batched(reward)
    for reward, learned in zip(rewards, is_learned, strict=True)
  ]
  names = [term.name for term in terms]
  if len({*names, FAILED}) <= len(names):
    raise ValueError(
      f'Rewards are logged by their names, which are {names}: give functions '
      f'of different names, none of them {FAILED!r}.'
    )

  def chosen(learned: bool):
    rows = zip(terms, weights, is_learned, strict=True)
    return [(term, weight) for term, weight, x in rows if x == learned]

  host = _sum(tokenizer, chosen(False)) if chosen(False) else None
  if not any(is_learned):
    return host
  scorers = [model.scorer(x, checkpoint, weight) for x, weight in chosen(True)]
  return verifiers.add_scores(host, scorers, decides=is_learned[0])


def _sum(
  tokenizer, terms: Sequence[tuple[rewards_base.Batched, float]]
) -> stages.Stage:
  """The stage that adds up functions of completions, on the host."""
  names = [term.name for term, _ in terms]

  def reward(reference: text_arrays.Reference, action_BT, mask_BT):
    completions = _completions(tokenizer, reference, action_BT, mask_BT)
    scores = {term.name: _scores(term, completions) for term, _ in terms}
    failed_B = np.zeros(len(completions), np.float32)
    for name, score_B in scores.items():
      bad_B = ~np.isfinite(score_B)
      failed_B = np.maximum(failed_B, bad_B)
      scores[name] = np.where(bad_B, np.float32(0), score_B)
    total_B = sum(
      np.float32(weight) * scores[term.name] for term, weight in terms
    )
    correct_B = (scores[names[0]] > 0.5).astype(np.float32)
    vote_B = tokens.text_ids([final_answer.vote(x.text) for x in completions])
    terms_B = {**scores, FAILED: failed_B}
    return base.Verdict(total_B, correct_B, terms_B, vote_B)

  def out_shapes(reference, action, mask):
    del reference, mask
    row = jax.ShapeDtypeStruct(action.shape[:1], jnp.float32)
    vote = jax.ShapeDtypeStruct(row.shape, jnp.int32)
    return base.Verdict(row, row, dict.fromkeys([*names, FAILED], row), vote)

  return stages.Stage(reward, 'reward', host=True, out_shapes=out_shapes)


def _scores(term: rewards_base.Batched, completions: Sequence) -> np.ndarray:
  """The rewards [B] of one term, NaN where it failed."""
  score_B = np.array(term.score(completions), np.float32).reshape(-1)
  if len(score_B) != len(completions):
    raise ValueError(
      f'The reward {term.name} gave {len(score_B)} numbers for '
      f'{len(completions)} completions: a `Batched` reward gives one for each.'
    )
  return score_B


def _completions(
  tokenizer, reference: text_arrays.Reference, action_BT, mask_BT
) -> list[rewards_base.Completion]:
  """The completions of a batch."""
  B, T = action_BT.shape
  columns = ['{}'] * B
  if reference.columns is not None:
    columns = text_arrays.unpack(reference.columns)
  return [
    rewards_base.Completion(
      *row, limit=T, columns=rewards_base.Columns(json.loads(text))
    )
    for *row, text in zip(
      tokens.decode(tokenizer, action_BT, mask_BT),
      text_arrays.unpack(reference.question),
      text_arrays.unpack(reference.answer),
      mask_BT.sum(1).astype(int).tolist(),
      columns,
      strict=True,
    )
  ]


def _batched(
  reward: rewards_base.Reward | rewards_base.Batched,
) -> rewards_base.Batched:
  """A reward as one of many completions."""
  if isinstance(reward, rewards_base.Batched):
    return reward
  name = getattr(_unwrapped(reward), '__name__', None)
  if name is None or not callable(reward):
    raise ValueError(
      f'{reward!r} is not a reward: give a function of a completion, such as '
      '@functions.boxed.'
    )
  _check_signature(reward, name)
  report = first_failure.Report(name)
  is_async = inspect.iscoroutinefunction(_unwrapped(reward))
  call = (_together if is_async else _one_by_one)(reward)

  def score(completions):
    return [report.number(value) for value in call(completions)]

  return rewards_base.Batched(name, score)


def _one_by_one(reward: Callable) -> Callable[[Sequence], list]:
  """Lists results of a function, or exceptions, one for each completion."""

  def result(completion):
    try:
      return reward(completion)
    except Exception as error:  # noqa: BLE001 (Foreign code.)
      return error

  return lambda completions: [result(x) for x in completions]


def _together(reward: Callable) -> Callable[[Sequence], list]:
  """Lists those of an `async` function, whose calls wait at the same time."""
  # One loop for all batches, as semaphores and clients belong to one, in a
  # thread of its own, as that of a notebook runs another.
  runner, thread = asyncio.Runner(), futures.ThreadPoolExecutor(1)

  async def result(completion):
    try:
      return await reward(completion)
    except Exception as error:  # noqa: BLE001 (Foreign code.)
      return error

  async def gather(completions):
    return await asyncio.gather(*map(result, completions))

  return lambda x: thread.submit(runner.run, gather(x)).result()


def _unwrapped(function: Callable) -> Callable:
  """The function itself, without what gin or `functools` put around it."""
  while isinstance(function, functools.partial):
    function = function.func
  return inspect.unwrap(function)


def _check_signature(reward: Callable, name: str):
  """Raises ValueError unless a reward can be called with one completion."""
  try:
    inspect.signature(reward).bind(None)
  except TypeError as error:
    raise ValueError(
      f'The reward {name}{inspect.signature(reward)} cannot be called with a '
      f'completion ({error}): write it as `{name}(completion) -> float`; a '
      'function that makes a reward is called by `()` in a recipe.'
    ) from error
