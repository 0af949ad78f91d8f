"""PPO of texts: its advantages, its losses, both kinds of critics, learning."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlinf_jax.run_files import checkpoint
import saved
from stages import base, workflows
from stages.language import value_model
from stages.learn import advantages, loss_terms, losses, objectives, optimizers
from stages.workflows.ppo import compute_advantages, critic_loss
import tiny
from tiny import read

KEY = jax.random.key(0)
# Full, ended, ended at once, and no token at all.
LENGTHS = (5, 3, 1, 0)
TRUNKS = {
  'own': lambda: value_model.own_trunk(tiny.CONFIG),
  'policy': lambda: value_model.head(tiny.CONFIG),
}


@functools.cache
def workflow(trunk='own', **kwargs):
  kwargs = {'group_size': 2} | kwargs
  return workflows.ppo(
    tiny.policy(length=4),
    tiny.even,
    TRUNKS[trunk](),
    optimizers.adamw(1e-2),
    optimizers.adamw(2e-2),
    **kwargs,
  )


def test_turns_are_rewarded_and_discounted_by_hand():
  """A penalty of 1/2 is left for the last turn; γ between turns is 1/2."""
  mask = jnp.array([[1.0, 1, 0, 1, 0, 0]])
  turns = base.Turns(jnp.array([[0.5, 2.0, 0.0]]), jnp.zeros((1, 3), int))
  value = jnp.array([[0.1, 0.2, 9.0, 0.3, 9.0, 9.0]])
  zero = jnp.zeros_like(mask)
  got = compute_advantages(
    (1.0, 0.5), (1.0, None), 0.0, jnp.array([2.0]), zero, (), value, mask, turns
  )
  return_ = [1.25, 1.25, 0, 1.5, 0, 0]
  np.testing.assert_allclose(got['reward'], [[0, 0.5, 0, 1.5, 0, 0]])
  np.testing.assert_allclose(got['return_'], [return_], rtol=1e-6)
  np.testing.assert_allclose(
    got['advantage'], (jnp.array([return_]) - value) * mask, rtol=1e-6
  )


def test_a_discount_between_turns_needs_turns():
  with pytest.raises(ValueError, match='turn_discount is for conversations'):
    tiny.trace(workflow(turn_discount=0.5), tiny.problem())


def ragged(seed=0, T=5):
  """Arrays of completions of `LENGTHS`, with NaN on padding."""
  rng = np.random.default_rng(seed)
  mask = (np.arange(T) < np.array(LENGTHS)[:, None]).astype(float)
  logp, ref_logp, value = np.where(
    mask, rng.normal(-1.0, 0.5, (3, *mask.shape)), np.nan
  )
  return rng.normal(size=len(LENGTHS)), logp, ref_logp, value, mask


def by_hand(discount, lambdas, penalty, reward, logp, ref_logp, value, mask):
  """Advantages and returns, token by token."""
  advantage, returned = np.zeros((2, *mask.shape))
  for i, length in enumerate(LENGTHS):
    v = np.append(value[i, :length], 0.0)
    r = -penalty * (logp[i, :length] - ref_logp[i, :length])
    if length:
      r[-1] += reward[i]
    for out, lambda_ in zip((advantage, returned), lambdas, strict=True):
      for t in range(length):
        for k in range(t, length):
          delta = r[k] + discount * v[k + 1] - v[k]
          out[i, t] += (discount * lambda_) ** (k - t) * delta
    returned[i, :length] += v[:-1]
  return advantage, returned


@pytest.mark.parametrize(
  'discount, lambdas, penalty',
  [(1.0, (0.95, 0.95), 0.0), (0.9, (0.8, 1.0), 0.3)],
)
def test_advantages_are_those_of_an_oracle(discount, lambdas, penalty):
  given = ragged()
  with jax.enable_x64():
    got = compute_advantages((discount, 1.0), lambdas, penalty, *given)
  want = by_hand(discount, lambdas, penalty, *given)
  exact = {'rtol': 1e-12, 'atol': 1e-12}
  np.testing.assert_allclose(got['advantage'], want[0], **exact)
  np.testing.assert_allclose(got['return_'], want[1], **exact)
  for x in got.values():
    assert not np.asarray(x)[given[-1] == 0].any()


@pytest.mark.usefixtures('in_float64')
def test_a_lambda_of_the_length_is_of_each_completion():
  given = ragged()
  adaptive = advantages.length_adaptive(0.5)
  got = compute_advantages((1.0, 1.0), (adaptive, 1.0), 0.0, *given)
  for i, length in enumerate(LENGTHS):
    lambda_ = max(1 - 2 / length, 0.0) if length else 0.0
    same = compute_advantages((1.0, 1.0), (lambda_, None), 0.0, *given)
    np.testing.assert_allclose(
      got['advantage'][i], same['advantage'][i], rtol=1e-6
    )


def trl_advantages(
  torch, reward, logp, ref_logp, value, mask, gamma, lam, beta
):
  """Steps 4 to 6 of `PPOTrainer.train` of TRL 0.23.1, on torch tensors.

  TRL rewards the position after the end token and keeps the value there; a
  mask with that position is given here.
  """
  kl = logp - ref_logp
  rewards = -beta * kl
  last = mask.sum(1).long() - 1
  rewards[torch.arange(len(last)), last] += reward
  lastgaelam, reversed_ = 0, []
  T = rewards.shape[1]
  for t in reversed(range(T)):
    nextvalues = value[:, t + 1] if t < T - 1 else 0.0
    delta = rewards[:, t] + gamma * nextvalues - value[:, t]
    lastgaelam = delta + gamma * lam * lastgaelam
    reversed_.append(lastgaelam)
  advantage = torch.stack(reversed_[::-1], axis=1)
  returns = advantage + value
  mean = (advantage * mask).sum() / mask.sum()
  variance = ((advantage - mean) ** 2 * mask).sum() / mask.sum()
  variance = variance * mask.sum() / (mask.sum() - 1)
  whitened = (advantage - mean) * torch.rsqrt(variance + 1e-8)
  return torch.masked_fill(whitened, mask == 0, 0), returns


def trl_loss(torch, logp, value, x, mask, cliprange, cliprange_value, vf_coef):
  """The loss of `PPOTrainer.train` of TRL 0.23.1."""

  def masked_mean(values):
    return (values * mask).sum() / mask.sum()

  clipped = torch.clamp(
    value, x['value'] - cliprange_value, x['value'] + cliprange_value
  )
  vf_losses1 = torch.square(value - x['return_'])
  vf_losses2 = torch.square(clipped - x['return_'])
  vf_loss = 0.5 * masked_mean(torch.max(vf_losses1, vf_losses2))
  ratio = torch.exp(logp - x['logp'])
  pg_losses = -x['advantage'] * ratio
  pg_losses2 = -x['advantage'] * torch.clamp(
    ratio, 1.0 - cliprange, 1.0 + cliprange
  )
  return masked_mean(torch.max(pg_losses, pg_losses2)) + vf_coef * vf_loss


def test_advantages_and_losses_are_those_of_trl():
  torch = pytest.importorskip('torch')
  reward, *given, mask = (x[:3] for x in ragged())  # TRL has no empty rows.
  given = [np.where(mask, x, 0.0) for x in given]
  tensors = [torch.tensor(x) for x in (reward, *given, mask)]
  want, returns = trl_advantages(torch, *tensors, 0.97, 0.9, 0.2)
  rng = np.random.default_rng(1)
  # Far enough to be clipped in both ways.
  logp, value = (x + rng.normal(0.0, 0.4, x.shape) for x in given[::2])
  with jax.enable_x64():
    got = compute_advantages(
      (0.97, 1.0), (0.9, None), 0.2, reward, *given, mask
    )
    # TRL's variance is the unbiased one.
    n = mask.sum()
    whitened = advantages.whiten(got['advantage'], mask) * np.sqrt((n - 1) / n)
    np.testing.assert_allclose(whitened, want, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(got['return_'] * mask, returns.numpy() * mask)
    x = base.Experience((), (), given[0], mask, (), **got)
    loss = objectives.policy(
      lambda params, *_: base.Evaluation(
        params[0], jnp.zeros_like(params[0]), params[1]
      ),
      clip=loss_terms.Clip(0.2, 0.2),
      aggregate=losses.token_mean,
      critic_loss=critic_loss(0.1, 0.2),
    )

    def total(params):
      (mean,), info, *_ = loss(params, x, ())
      return mean.sum / mean.count, info

    (ours, info), slopes = jax.value_and_grad(total, has_aux=True)(
      (jnp.asarray(logp), jnp.asarray(value))
    )
  theirs = {k: torch.tensor(np.asarray(v)) for k, v in got.items()}
  theirs['logp'] = tensors[1]
  params = [torch.tensor(p, requires_grad=True) for p in (logp, value)]
  expected = trl_loss(torch, *params, theirs, tensors[-1], 0.2, 0.2, 0.1)
  expected.backward()
  np.testing.assert_allclose(ours, expected.item(), rtol=1e-12)
  for slope, param in zip(slopes, params, strict=True):
    np.testing.assert_allclose(slope, param.grad, rtol=1e-9, atol=1e-12)
  assert 0 < read(info)['train/value_clip_fraction'] < 1
  assert 0 < read(info)['train/clip_fraction'] < 1


def test_a_head_on_the_policy_has_the_values_of_the_same_own_trunk():
  own, head = (make() for make in TRUNKS.values())
  policy, problem = tiny.policy(), tiny.problem(rows=4)
  params = policy.init(KEY)
  value_D = jax.random.normal(KEY, params['norm_D'].shape)
  action = jax.random.randint(KEY, (4, tiny.LENGTH), 0, tiny.CONFIG.V)
  given = problem.prompt, action
  with_head = params | {base.CRITIC: {'value_D': value_D}}
  want = own.value(params | {'value_D': value_D}, *given)
  assert np.std(want) > 0.1
  np.testing.assert_array_equal(head.value(with_head, *given), want)
  now = policy.evaluate(with_head, *given)
  np.testing.assert_allclose(now.value, want, rtol=1e-6, atol=1e-6)
  assert policy.evaluate(params, *given).value is None


def test_a_value_does_not_see_its_own_token():
  own, problem = TRUNKS['own'](), tiny.problem(rows=2)
  params = own.init(KEY) | {'value_D': jnp.ones(tiny.CONFIG.D)}
  action = np.full((2, 4), 3, np.int32)
  other = action.copy()
  other[:, 2] = 5
  one, two = (own.value(params, problem.prompt, a) for a in (action, other))
  np.testing.assert_array_equal(one[:, :3], two[:, :3])
  assert (one[:, 3] != two[:, 3]).all()


@pytest.mark.parametrize('trunk', TRUNKS)
def test_the_flow_has_an_actor_a_critic_and_a_reference(trunk):
  flow = tiny.trace(workflow(trunk, kl_coef=0.1), tiny.problem())
  names = [node.stage.name for node in flow.nodes]
  assert {'generate', 'value', 'ref_logp', 'compute_advantages'} <= {*names}
  assert ('critic_gradient' in names) == (trunk == 'own')
  # The critic's head is not sent to where completions are sampled.
  state = jax.eval_shape(workflow(trunk).init, KEY)
  like = jax.tree.structure(jax.eval_shape(tiny.policy().init, KEY))
  assert jax.tree.structure(workflow(trunk).params(state)) == like


def test_a_kl_penalty_and_a_kl_loss_exclude_each_other():
  with pytest.raises(ValueError, match='count the distance from the reference'):
    workflow(kl_coef=0.1, kl_reward_coef=0.1)


def test_log_probs_that_are_rounded_or_stale_are_corrected_as_in_grpo():
  for dtype, lag in (('float32', 0), ('float32', 1), ('bfloat16', 0)):
    ppo = workflows.ppo(
      tiny.policy(dtype),
      tiny.even,
      TRUNKS['own'](),
      optax.sgd(1.0),
      optax.sgd(1.0),
      staleness=lag,
    )
    is_corrected = bool(lag or dtype == 'bfloat16')
    flow = tiny.trace(ppo, tiny.problem())
    assert ('proximal_logp' in flow.stages) == is_corrected


def test_a_stale_policy_is_clipped_around_the_version_before_the_update():
  ppo = workflow('own', staleness=1)
  state, ratios, gaps = ppo.init(KEY), [], []
  for i in range(2):
    state, info = ppo.step(state, tiny.problem(), jax.random.key(i))
    ratios.append(read(info)['train/ratio_max'])
    gaps.append(read(info)['rollout/logprob_gap_max'])
  np.testing.assert_allclose(ratios, 1.0, rtol=1e-5)
  assert gaps[0] < 1e-4 < gaps[1]


@pytest.mark.slow
@pytest.mark.parametrize('trunk', TRUNKS)
def test_ppo_learns_after_its_critic(trunk, tmp_path):
  ppo = workflow(
    trunk, num_minibatches=2, critic_warmup_steps=2, critic_gae_lambda=1.0
  )
  state, numbers = ppo.init(KEY), []
  first = tiny.arrays(ppo.params(state))
  for i in range(30):
    key = jax.random.fold_in(KEY, i)
    state, info = ppo.step(state, tiny.problem(seed=i), key)
    numbers.append(read(info))
    if i == 1:  # The warm-up trains only the critic.
      tiny.assert_same_bits(ppo.params(state), first)
  losses_ = [x['train/value_loss'] for x in numbers]
  rewards = [x['rollout/reward_mean'] for x in numbers]
  assert np.mean(rewards[:3]) < 0.65
  assert np.mean(rewards[-3:]) > 0.9
  assert np.mean(losses_[-3:]) < np.mean(losses_[:3])
  # A checkpoint has the actor and the critic, to the bit.
  written = checkpoint.Checkpoints(tmp_path, 1)
  written.save(30, saved.Tree(state), {'i': np.array(1)}, {})
  written.close()
  reader = checkpoint.Checkpoints(tmp_path, 1)
  _, restored = saved.load(reader, state, {'i': 0})
  tiny.assert_same_bits(restored, state)
