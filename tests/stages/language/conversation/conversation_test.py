"""Conversations of a tiny policy with an environment of plain tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import base, workflows
from stages.language import (
  conversation,
  evaluate,
  policy_stages,
  rollout_metrics,
)
from stages.language.conversation import conversation_state
from stages.language.scoring import packing
from stages.learn import objectives, optimizers
import tiny
import toy_conversation

LENGTH, TURNS, GROUP = 16, 3, 2


@functools.cache
def policy(**kwargs):
  return tiny.policy(length=LENGTH, **kwargs)


@functools.cache
def converse(name='generate', **kwargs):
  return conversation.converse(
    policy(),
    name,
    group_size=GROUP,
    envs=toy_conversation.envs(),
    max_turns=TURNS,
    **kwargs,
  )


@pytest.fixture(scope='module')
def params():
  return policy().init(jax.random.key(1))


@pytest.fixture(scope='module')
def played(params):
  """Conversations of eight rows, in groups of two."""
  prompts = policy_stages.repeat(GROUP)(tiny.problem(rows=8))
  key_B = jax.random.split(jax.random.key(2), 16)
  now = base.Version(params, jnp.int32(7))
  problem, x = converse()(now, prompts, key_B)
  return problem, jax.device_get(x)


def own_turns(x, i):
  """Runs of own tokens of row `i`, and what the environment said between."""
  end = int(packing.lengths(x.mask)[i])
  turns, said = [[]], [[]]
  for token, own in zip(x.action[i, :end], x.mask[i, :end], strict=True):
    if own:
      if said[-1]:
        turns.append([])
        said.append([])
      turns[-1].append(int(token))
    else:
      said[-1].append(int(token))
  return turns, said[:-1]


def test_the_environment_hears_turns_and_its_answer_is_masked(played):
  problem, x = played
  several = 0
  for i in range(x.mask.shape[0]):
    turns, said = own_turns(x, i)
    several += len(turns) > 1
    for turn, answer in zip(turns, said, strict=False):
      assert turn[-1] == 0 and 0 not in turn[:-1]  # Token 0 ends a turn.
      assert answer == toy_conversation.answer(turn)
    finished = turns[-1][-1] == 0
    assert problem.answer.terms['turns'][i] == len(turns) - 1 + finished
  assert several >= 3


def test_rewards_of_all_turns_add_up(played):
  problem, x = played
  for i in range(x.mask.shape[0]):
    turns, _ = own_turns(x, i)
    heard = [turn for turn in turns if turn[-1] == 0]
    expected = sum(toy_conversation.reward(turn) for turn in heard)
    assert problem.answer.reward[i] == pytest.approx(expected)
    reward_K, state_K = jax.tree.map(lambda x_BK: x_BK[i], problem.answer.turns)
    rewards = [toy_conversation.reward(turn) for turn in heard]
    rewards += [0.0] * (TURNS - len(heard))
    np.testing.assert_allclose(reward_K, rewards)
    states = [0, *(toy_conversation.state(turn) for turn in turns[:-1])]
    states += [0] * (TURNS - len(states))
    assert state_K.tolist() == states


def test_recorded_log_probs_are_those_of_scoring_the_whole_row(played, params):
  _, x = played
  score = jax.jit(functools.partial(policy().evaluate, group_size=GROUP))
  logp_BT = score(params, x.obs, x.action).logp
  assert x.mask.sum() > x.mask.shape[0]
  np.testing.assert_allclose(
    np.where(x.mask > 0, logp_BT, 0), x.logp * x.mask, atol=1e-5
  )


def test_tokens_of_the_environment_are_in_no_gradient(played, params):
  """They are read, but their log-probabilities are not learned."""
  _, x = played
  answer_BT = (x.mask == 0) & (
    np.arange(LENGTH)[None] < np.asarray(packing.lengths(x.mask))[:, None]
  )
  assert answer_BT.any()
  loss = objectives.policy(policy_stages.scorer(policy(), GROUP))
  x = jax.tree.map(jnp.asarray, x)._replace(advantage=jnp.ones_like(x.logp))

  @jax.jit
  def gradient(logp_BT, advantage_BT):
    changed = x._replace(logp=logp_BT, advantage=advantage_BT)
    return jax.grad(lambda p: loss(p, changed, ()).means[0].sum)(params)

  one = gradient(x.logp, x.advantage)
  wild_BT = jnp.where(answer_BT, 1e3, 0.0)
  other = gradient(x.logp - wild_BT, x.advantage + wild_BT)
  jax.tree.map(np.testing.assert_array_equal, one, other)
  # The same change on own tokens is felt.
  felt = gradient(x.logp, x.advantage + 1e3 * x.mask)
  assert float(jnp.abs(felt['norm_D'] - one['norm_D']).max()) > 1.0


def test_a_row_does_not_depend_on_the_others(played, params):
  problem, x = played
  prompts = policy_stages.repeat(GROUP)(tiny.problem(rows=8))
  key_B = jax.random.split(jax.random.key(2), 16)
  part = jax.tree.map(lambda a: a[4:8], prompts)
  _, y = converse()(base.Version(params, jnp.int32(7)), part, key_B[4:8])
  np.testing.assert_array_equal(y.action, x.action[4:8])
  np.testing.assert_array_equal(y.mask, x.mask[4:8])


@pytest.mark.parametrize('slots', [3, 8])
def test_a_row_does_not_depend_on_when_answers_come(played, params, slots):
  """Nor on the slots: tokens are those of a batch that decodes together."""
  problem, x = played
  prompts = policy_stages.repeat(GROUP)(tiny.problem(rows=8))
  key_B = jax.random.split(jax.random.key(2), 16)

  def in_order(seed):
    run = conversation.converse(
      policy(),
      'generate',
      group_size=GROUP,
      envs=toy_conversation.envs(slots, seed),
      max_turns=TURNS,
    )
    return jax.device_get(
      run(base.Version(params, jnp.int32(7)), prompts, key_B)
    )

  first = in_order(seed=0)
  for seed in (1, 2):
    jax.tree.map(np.testing.assert_array_equal, first, in_order(seed))
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=1e-6),
    first,
    (jax.device_get(problem), x),
  )
  np.testing.assert_array_equal(first[1].action, x.action)


def now_of(own, alive, waits, T=8):
  """A conversation of one row each of `own`, a string of 1 and 0."""
  B = len(own)
  own_BT = np.zeros((B, T), np.float32)
  mask_BT = np.zeros((B, T), np.float32)
  for i, row in enumerate(own):
    own_BT[i, : len(row)] = [int(c) for c in row]
    mask_BT[i, : len(row)] = 1
  action_BT = np.where(mask_BT > 0, 9, 0).astype(np.int32)
  zero_B = jnp.zeros(B)
  return conversation_state.Conversation(
    id=jnp.zeros((B, 2), jnp.uint32),
    completions=base.Completions(
      jnp.asarray(action_BT),
      jnp.zeros((B, T)),
      jnp.asarray(mask_BT),
      jnp.array(alive),
    ),
    own=jnp.asarray(own_BT),
    waits=jnp.array(waits),
    idle=jnp.zeros(B, bool),
    turns=jnp.zeros(B, jnp.int32),
    by_turn=base.Turns(jnp.zeros((B, 3)), jnp.zeros((B, 3), jnp.int32)),
    terms={'calls': zero_B},
    truncated=zero_B,
    failed=zero_B,
  )


def reply_of(said, answered=None, **fields):
  """A reply whose rows are lists of tokens."""
  B = len(said)
  zero_B = jnp.zeros(B)
  token_BE, mask_BE = np.zeros((2, B, 4), np.int32)
  for i, row in enumerate(said):
    token_BE[i, : len(row)] = row
    mask_BE[i, : len(row)] = 1
  names = ('reward', 'terminated', 'truncated', 'failed')
  given = {name: jnp.array(fields.get(name, zero_B)) for name in names}
  return conversation_state.Reply(
    jnp.ones(B) if answered is None else jnp.array(answered),
    jnp.array(fields.get('holds', zero_B)),
    jnp.asarray(token_BE),
    jnp.asarray(mask_BE),
    **given,
    terms={'calls': jnp.ones(B)},
    state=jnp.asarray(fields.get('state', np.zeros(B)), jnp.int32),
  )


def test_answers_are_appended_by_hand():
  #      waits, goes on; has no room; terminated; failed; does not wait
  now = now_of(
    ['11', '111111', '11', '1', '1110'],
    alive=[False, False, False, False, False],
    waits=[True, True, True, True, False],
  )
  reply = reply_of(
    [[3, 4], [3, 4], [], [3], [3, 4, 5, 6]],
    reward=[0.5, 0.5, 1.0, 0.0, 9.0],
    terminated=[0.0, 0.0, 1.0, 0.0, 1.0],
    failed=[0.0, 0.0, 0.0, 1.0, 0.0],
    state=[4, 5, 6, 7, 8],
  )
  out = jax.jit(conversation_state.append)(now, reply)
  done = out.completions
  assert done.action[0].tolist() == [9, 9, 3, 4, 0, 0, 0, 0]
  assert done.mask.sum(1).tolist() == [4, 6, 2, 1, 4]
  assert done.alive.tolist() == [True, False, False, False, False]
  assert out.truncated.tolist() == [0, 1, 0, 0, 0]
  assert out.failed.tolist() == [0, 0, 0, 1, 0]
  assert out.by_turn.reward[:, 0].tolist() == [0.5, 0.5, 1.0, 0.0, 0.0]
  assert not out.by_turn.reward[:, 1:].any()
  # Only the row that goes on reaches a state.
  assert out.by_turn.state.tolist() == [[0, 4, 0]] + [[0, 0, 0]] * 4
  assert out.turns.tolist() == [1, 1, 1, 1, 0]
  assert out.terms['calls'].tolist() == [1, 1, 1, 1, 0]
  np.testing.assert_array_equal(out.own, now.own)

  x, episode = jax.jit(conversation.finish)((3,), tiny.problem(rows=5), out)
  # Alive after the last turn, without room, ended, failed, ended before.
  assert x.truncated.tolist() == [1, 1, 0, 0, 0]
  assert x.mask.sum(1).tolist() == [2, 6, 2, 0, 3]  # Nothing of a failure.
  verdict = conversation.episode_return(truncation_penalty=0.25)(
    episode, x.action, x.mask
  )
  assert verdict.reward.tolist() == [0.25, 0.25, 1.0, 0.0, 0.0]
  assert verdict.correct.tolist() == [0, 0, 1, 0, 0]


def test_failed_environments_are_counted_and_in_no_other_metric():
  #      kept; failed; padding; kept   |   a group that failed as a whole
  now = now_of(
    ['11', '11', '', '1', '1', '1', '1', '1'], [False] * 8, [True] * 8
  )
  failed_B = jnp.array([0, 1, 0, 0, 1, 1, 1, 1.0])
  reward_B = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
  by_turn = now.by_turn._replace(
    reward=now.by_turn.reward.at[:, 0].set(jnp.array(reward_B))
  )
  now = now._replace(by_turn=by_turn, failed=failed_B)
  problem = tiny.problem(rows=8)
  x, episode = conversation.finish((jnp.int32(0),), problem, now)
  verdict = conversation.episode_return()(episode, x.action, x.mask)
  info = rollout_metrics.describe(x, verdict, jnp.int32(0), 4, 1)
  numbers = tiny.read(info)
  assert numbers['rollout/env_failed'] == 5
  assert numbers['rollout/reward_mean'] == 1.0
  assert numbers['rollout/accuracy'] == 1.0
  # The rewards of the first group are alike; the second has none to compare.
  assert numbers['rollout/groups_degenerate'] == 1.0
  assert numbers['rollout/response_length_mean'] == 1.5


def test_rows_without_an_answer_wait_and_the_last_turn_truncates():
  #      answered in the first turn; not answered; in the last turn
  now = now_of(['11', '11', '11'], alive=[False] * 3, waits=[True] * 3)
  now = now._replace(turns=jnp.array([0, 0, 2]))
  reply = reply_of([[3]] * 3, [1.0, 0.0, 1.0], reward=[0.5, 9.0, 0.25])
  out = jax.jit(conversation_state.append)(now, reply)
  assert out.completions.alive.tolist() == [True, False, False]
  assert out.completions.mask.sum(1).tolist() == [3, 2, 2]
  assert out.waits.tolist() == [False, True, False]
  assert out.turns.tolist() == [1, 0, 3]
  assert out.truncated.tolist() == [0, 0, 1]
  assert out.by_turn.reward.tolist() == [[0.5, 0, 0], [0, 0, 0], [0, 0, 0.25]]
  assert out.terms['calls'].tolist() == [1, 0, 1]


def test_grpo_learns_from_conversations_and_evaluates_them():
  grpo = workflows.grpo(
    policy(),
    conversation.episode_return(),
    optimizers.adamw(1e-3),
    group_size=GROUP,
    rollouts=functools.partial(
      policy_stages.complete, converse=toy_conversation.converse(TURNS)
    ),
    evaluator=functools.partial(
      evaluate.evaluate, converse=toy_conversation.converse(TURNS)
    ),
  )
  state = grpo.init(jax.random.key(0))
  new, info = grpo.step(state, tiny.problem(rows=4), jax.random.key(1))
  numbers = tiny.read(info)
  assert 1.0 < numbers['rollout/reward/turns'] <= TURNS
  assert float(jnp.abs(new.actor.params['norm_D'] - 1.0).max()) > 0
  scores = tiny.read(grpo.evaluate(new, tiny.problem(), jax.random.key(1)))
  assert 0 <= scores['eval/accuracy'] <= 1


def test_planners_count_on_no_more_turns_than_there_can_be(params):
  prompts = policy_stages.repeat(GROUP)(tiny.problem(rows=2))
  key_B = jax.random.split(jax.random.key(2), 4)
  run = conversation.converse(
    policy(),
    'generate',
    group_size=GROUP,
    envs=toy_conversation.envs(),
    max_turns=1,
    expected_turns=TURNS,
  )
  _, x = run(base.Version(params, jnp.int32(0)), prompts, key_B)
  assert all(len(own_turns(x, i)[0]) == 1 for i in range(4))


def test_policies_that_cannot_continue_are_refused():
  with pytest.raises(ValueError, match='slots'):
    conversation.converse(
      tiny.policy(length=LENGTH, slots=2),
      'generate',
      envs=toy_conversation.envs(),
      max_turns=2,
    )
