import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stages
from stages import base, metrics
from stages.learn import losses, objectives, optimizers, train_step

PIECES = [1, 2, 4, 8]


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64():
    yield


def problem(seed=0, rows=16, tokens=5, width=3, words=7):
  """Parameters of a small policy, and rows of very different lengths."""
  rng = np.random.default_rng(seed)
  params = {
    'out': jnp.asarray(rng.normal(size=(width, words))),
    'bias': jnp.asarray(rng.normal(size=words)),
  }
  length = rng.integers(0, tokens + 1, rows)
  length[:2] = 0, tokens
  batch = (
    jnp.asarray(rng.normal(size=(rows, tokens, width))),
    jnp.asarray(rng.integers(0, words, (rows, tokens))),
    jnp.asarray(rng.normal(-2.0, 0.3, (rows, tokens))),
    jnp.asarray(np.repeat(rng.normal(size=(rows, 1)), tokens, axis=1)),
    jnp.asarray((np.arange(tokens) < length[:, None]).astype(float)),
  )
  return params, batch


def terms(params, obs, action, old_logp, advantage, mask):
  """Loss per token of two terms, to be averaged in different ways."""
  logits = jnp.einsum('BTD,DV->BTV', obs, params['out'])
  logps = jax.nn.log_softmax(logits + params['bias'][None, None])
  logp = jnp.take_along_axis(logps, action[..., None], axis=-1)[..., 0]
  policy = losses.ppo_clip(logp, old_logp, advantage, 0.2, 0.28)
  return policy, 0.1 * losses.kl_k3(logp, old_logp)


def loss(params, *batch):
  policy, kl = terms(params, *batch)
  mask = batch[-1]
  return (
    losses.token_mean(policy, mask),
    losses.sequence_mean_token_mean(kl, mask),
  ), {'train/kl': metrics.mean(kl, mask)}


gradient = stages.Stage(
  train_step.gradient(loss), 'gradient', 'sum', unbatched=(0,)
)


def plain_loss(params, *batch):
  """The same of the whole batch, as the equations say it."""
  policy, kl = terms(params, *batch)
  mask = batch[-1]
  per_row = (kl * mask).sum(1) / jnp.maximum(mask.sum(1), 1)
  return (policy * mask).sum() / mask.sum() + per_row.mean()


plain_gradient = jax.jit(jax.grad(plain_loss))


def split(batch, pieces):
  parts = (jnp.split(x, pieces) for x in batch)
  return list(zip(*parts, strict=True))


def close(got, want, rtol=1e-9):
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=rtol, atol=1e-12),
    got,
    want,
  )


def equal(got, want):
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize('pieces', PIECES)
@pytest.mark.parametrize(
  'optimizer',
  [optax.sgd(0.1, momentum=0.9), optax.adamw(1e-2), optimizers.adamw(1e-2)],
  ids=['sgd', 'optax.adamw', 'train.adamw'],
)
def test_a_step_in_pieces_is_the_plain_step_on_the_whole(optimizer, pieces):
  params, batch = problem()
  apply = stages.Stage(train_step.apply(optimizer), 'apply', 'batch')
  state = train_step.init(params, optimizer)
  opt_state = optimizer.init(params)
  for step in (1, 2):  # The second has moments.
    parts = [gradient(state.params, *part) for part in split(batch, pieces)]
    state, info = apply(state, functools.reduce(gradient.merge, parts))
    grads = plain_gradient(params, *batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    close((state.params, state.opt_state), (params, opt_state))
    assert state.step == step
    numbers, _ = metrics.read(jax.device_get(info))
    close(numbers['train/grad_norm'], optax.tree.norm(grads))
    assert numbers['train/skipped'] == 0


@pytest.mark.parametrize('pieces', PIECES)
def test_metrics_of_pieces_are_those_of_the_whole(pieces):
  params, batch = problem(1)
  parts = [gradient(params, *part).info for part in split(batch, pieces)]
  close(functools.reduce(metrics.merge, parts), gradient(params, *batch).info)


def test_pieces_carry_numerators_and_their_share_of_each_denominator():
  params, batch = problem(2)
  policy, kl = terms(params, *batch)
  got = gradient(params, *batch)
  close(got.denominators, (batch[-1].sum(), 16.0))
  for i in range(2):
    close(
      got.numerators[i],
      jax.grad(lambda p, i=i: loss(p, *batch)[0][i].sum)(params),
    )


def test_a_mean_of_the_means_of_pieces_is_not_the_mean():
  # A published system lost this: the same data in 1, 2 and 4 micro-batches had
  # token means of 0.349, 0.472 and 0.226.
  params, batch = problem(3)
  token_mean = jax.jit(lambda *batch: loss(params, *batch)[0][0])
  published, ours = [], []
  for pieces in PIECES:
    means = [token_mean(*part) for part in split(batch, pieces)]
    published.append(np.mean([mean.value()[''] for mean in means]))
    ours.append(functools.reduce(metrics.merge, means).value()[''])
  assert min(np.abs(np.diff(published))) > 0.01
  np.testing.assert_allclose(ours, ours[0], rtol=1e-9)


def test_steps_on_the_means_of_pieces_would_differ():
  params, batch = problem(4)
  optimizer = optax.sgd(1.0)
  policy = lambda params, *batch: (loss(params, *batch)[0][:1], {})
  sums = jax.jit(train_step.gradient(policy))

  @jax.jit
  @jax.grad
  def mean(params, *batch):
    total, count = policy(params, *batch)[0][0]
    return total / count

  def published(pieces):
    grads = [mean(params, *part) for part in split(batch, pieces)]
    return jax.tree.map(lambda *g: sum(g) / pieces, *grads)

  def ours(pieces):
    parts = [sums(params, *part) for part in split(batch, pieces)]
    state, _ = train_step.apply(optimizer)(
      train_step.init(params, optimizer), functools.reduce(metrics.merge, parts)
    )
    return jax.tree.map(jnp.subtract, params, state.params)

  close(ours(4), ours(1))
  close(published(1), ours(1))
  off = jax.tree.map(jnp.subtract, published(4), published(1))
  assert optax.tree.norm(off) > 0.1 * optax.tree.norm(published(1))


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(bad):
  params, batch = problem(5)
  optimizer = optimizers.adamw(1e-2, warmup_steps=3)
  apply = jax.jit(train_step.apply(optimizer))
  state, _ = apply(train_step.init(params, optimizer), gradient(params, *batch))
  poisoned = list(batch)
  poisoned[3] = batch[3].at[1, 0].set(bad)  # One token's advantage.
  parts = [gradient(state.params, *part) for part in split(poisoned, 4)]
  after, info = apply(state, functools.reduce(metrics.merge, parts))
  equal((after.params, after.opt_state), (state.params, state.opt_state))
  assert after.step == 2
  assert metrics.read(jax.device_get(info))[0]['train/skipped'] == 1
  # The next batch is taken as if the bad one had never been.
  good = gradient(state.params, *batch)
  equal(apply(after, good)[0].params, apply(state, good)[0].params)


def test_a_batch_of_padding_has_no_gradient():
  params, batch = problem(6)
  empty = (*batch[:-1], jnp.zeros_like(batch[-1]))
  optimizer = optax.sgd(1.0)
  state = train_step.init(params, optimizer)
  after, info = train_step.apply(optimizer)(state, gradient(params, *empty))
  equal(after.params, params)
  assert metrics.read(jax.device_get(info))[0]['train/skipped'] == 0


def masked_gradient(aggregate):
  """`params, *batch -> Gradient` of a loss of texts, as workflows make it."""

  def evaluate(params, x):
    logits = jnp.einsum('BTD,DV->BTV', x.obs, params['out'])
    logps = jax.nn.log_softmax(logits + params['bias'][None, None])
    logp = jnp.take_along_axis(logps, x.action[..., None], axis=-1)[..., 0]
    return base.Evaluation(logp, jnp.zeros_like(logp))

  of_experience = objectives.policy(evaluate, aggregate=aggregate)

  def loss(params, obs, action, old_logp, advantage, mask):
    x = base.Experience(obs, action, old_logp, mask, (), advantage=advantage)
    return of_experience(params, x, ())

  return jax.jit(train_step.gradient(loss))


@pytest.mark.parametrize('pieces', [1, 4])
@pytest.mark.parametrize(
  'aggregate',
  [losses.token_mean, losses.sequence_mean_token_mean, losses.constant(5)],
  ids=['token_mean', 'sequence_mean', 'constant'],
)
def test_a_minibatch_without_a_token_moves_neither_parameters_nor_moments(
  aggregate, pieces
):
  params, batch = problem(6)
  optimizer = optimizers.adamw(1e-2, weight_decay=0.1)
  apply = jax.jit(train_step.apply(optimizer))
  gradient = masked_gradient(aggregate)

  def whole(params, mask):
    parts = split((*batch[:-1], mask), pieces)
    parts = [gradient(params, *part) for part in parts]
    return functools.reduce(metrics.merge, parts)

  state = train_step.init(params, optimizer)
  state, _ = apply(state, whole(params, batch[-1]))  # There are moments now.
  after, info = apply(state, whole(state.params, jnp.zeros((16, 5))))
  equal((after.params, after.opt_state), (state.params, state.opt_state))
  assert after.step == 2
  numbers, _ = metrics.read(jax.device_get(info))
  assert numbers['train/skipped'] == 0
  assert info['train/grad_norm'].count == 0
  # Pieces without a token do not matter where others have some.
  one = jnp.zeros((16, 5)).at[15].set(1.0)
  moved, _ = apply(state, whole(state.params, one))
  plain, _ = apply(state, gradient(state.params, *batch[:-1], one))
  close(moved, plain)
  assert (moved.params['out'] != state.params['out']).all()


def test_bfloat16_parameters_are_updated_in_float32():
  # In bfloat16, 0.999 is 1 and Adam's bias correction divides by zero.
  optimizer = optimizers.adamw(1 / 16)
  apply = jax.jit(train_step.apply(optimizer))
  state = train_step.init({'w': jnp.ones(3, jnp.bfloat16)}, optimizer)
  numerator = {'w': jnp.array([1.0, -1.0, 0.5], jnp.bfloat16)}
  gradient = train_step.Gradient((numerator,), (jnp.full((), 3.0),), {})
  types = jax.tree.map(jnp.dtype, state)
  for _ in range(2):
    state, _ = apply(state, gradient)
  assert jax.tree.map(jnp.dtype, state) == types
  np.testing.assert_array_equal(state.params['w'], [0.875, 1.125, 0.875])


def test_an_optimizer_is_shown_float32():
  dtypes = []

  def update(updates, params):
    dtypes.append((updates.dtype, params.dtype))
    return updates

  optimizer, one = optax.stateless(update), jnp.ones(2, jnp.bfloat16)
  gradient = train_step.Gradient((one,), (jnp.ones(()),), {})
  state, _ = train_step.apply(optimizer)(
    train_step.init(one, optimizer), gradient
  )
  assert dtypes == [(jnp.float32, jnp.float32)]
  assert state.params.dtype == jnp.bfloat16


def test_the_norm_is_logged_before_it_is_clipped():
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
  gradient = train_step.Gradient(
    ({'w': jnp.array([6.0, 8.0])},), (jnp.array(2.0),), {}
  )
  state, info = train_step.apply(optimizer)(
    train_step.init({'w': jnp.zeros(2)}, optimizer), gradient
  )
  close(state.params, {'w': jnp.array([-0.6, -0.8])})
  assert info['train/grad_norm'].value() == {'': 5.0}
