"""OpenVLA-OFT, compared with published blocks in torch in its order."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import base
from stages.language import sample
from stages.vla import augmentation, pictures
from stages.vla.openvla import (
  action_tokens,
  openvla_oft,
  openvla_oft_policy,
)
from tests.stages.vla.openvla import openvla_test

torch = openvla_test.torch
case = openvla_test.case  # The same blocks, once a module.
END, BINS = openvla_test.END, openvla_test.BINS
Z, A, O, STOP, D = 3, 2, 3, 2, 12
STATS = action_tokens.ActionStats(
  np.float32([-2, 0]), np.float32([2, 3]), np.array([True, False])
)


class Head(torch.nn.Module):
  """The published regression head: a residual network of two blocks."""

  def __init__(self):
    super().__init__()
    nn = torch.nn
    self.first = nn.Sequential(
      nn.LayerNorm(A * D), nn.Linear(A * D, D), nn.ReLU()
    )
    self.blocks = nn.ModuleList(
      nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.ReLU())
      for _ in range(2)
    )
    self.last = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, A))

  def forward(self, x):
    x = self.first(x)
    for block in self.blocks:
      x = x + block(x)
    return self.last(x)


def affine(name, letters, linear):
  """Parameters of a linear map or, with one letter, of a LayerNorm."""
  weight = linear.weight.detach().numpy().T
  bias = linear.bias.detach().numpy()
  return {f'{name}_{letters}': weight, f'{name}_bias_{letters[-1]}': bias}


@pytest.fixture(scope='module')
def model(case):
  """Heads in torch, and the parameters of the whole model."""
  torch.manual_seed(1)
  nn = torch.nn
  project = nn.Sequential(nn.Linear(O, D), nn.GELU(), nn.Linear(D, D))
  head = Head()
  with torch.no_grad():
    for parameter in [*project.parameters(), *head.parameters()]:
      parameter.add_(0.3 * torch.randn_like(parameter))
  own = {
    'state_projector': affine('in', 'OF', project[0])
    | affine('out', 'FD', project[2]),
    'l1_head': affine('in_norm', 'O', head.first[0])
    | affine('in', 'OD', head.first[1])
    | affine('block0_norm', 'D', head.blocks[0][0])
    | affine('block0', 'DF', head.blocks[0][1])
    | affine('block1_norm', 'D', head.blocks[1][0])
    | affine('block1', 'DF', head.blocks[1][1])
    | affine('out_norm', 'D', head.last[0])
    | affine('out', 'DA', head.last[1]),
  }
  params = case.params | jax.tree.map(jnp.asarray, own)
  return project, head, params


def config(case, **settings):
  return openvla_oft.Config(case.config, Z=Z, A=A, O=O, cameras=2, **settings)


def policy(case, head='token', **settings):
  return openvla_oft_policy.policy(config(case, head=head), STATS, **settings)


def observation():
  one = openvla_test.observation()
  wrist = one.image[:, ::-1, :9]
  state = jax.random.normal(jax.random.key(7), (3, O))
  return openvla_oft.Observation((one.image, wrist), one.prompt, state)


def reference(case, project, obs):
  """Action logits and normalized states, row by row, without padding."""
  llama, logits, states = case.torch['llama'], [], []
  for b in range(3):
    length = int(obs.prompt.mask[b].sum())
    token = [*map(int, obs.prompt.token[b, :length]), *[1] * (Z * A), STOP]
    x = llama.get_input_embeddings()(torch.tensor(token))[None]
    x[:, length:-1] = 0.0
    seen = [openvla_test.reference_patches(case, x[b]) for x in obs.images]
    state = torch.tensor(np.asarray(obs.state[b]))[None, None]
    x = torch.cat([x[:, :1], *seen, project(state), x[:, 1:]], 1)
    S = x.shape[1]
    result = llama(
      inputs_embeds=x,
      attention_mask=torch.zeros(1, 1, S, S),
      output_hidden_states=True,
    )
    start = 4 + 4 + 1 + length - 1  # Patches, state, prompt, one before.
    columns = slice(start, start + Z * A)
    logits.append(result.logits[0, columns, END - BINS : END])
    states.append(result.hidden_states[-1][0, columns])
  return torch.stack(logits), torch.stack(states)


@pytest.fixture(scope='module')
def wanted(case, model):
  with torch.no_grad():
    return reference(case, model[0], observation())


def test_scores_and_values_are_those_of_the_published_order(
  case, model, wanted
):
  logits, states = wanted
  rng = np.random.default_rng(2)
  action = rng.integers(END - BINS, END, (3, Z * A)).astype(np.int32)
  want = torch.log_softmax(logits, -1)
  chosen = torch.tensor(action).long() - (END - BINS)
  logp = want.gather(-1, chosen[..., None])[..., 0]
  evaluate = jax.jit(policy(case, logp_of='token').evaluate)
  got = evaluate(model[2], observation(), action)
  logp, entropy = (
    x.reshape(3, Z, A) for x in (logp, -(want.exp() * want).sum(-1))
  )
  np.testing.assert_allclose(got.logp, logp, rtol=0, atol=1e-4)
  np.testing.assert_allclose(got.entropy, entropy, rtol=0, atol=1e-4)
  value_D = np.asarray(case.params[base.CRITIC]['value_D'])
  value = states[:, 0].numpy() @ value_D
  np.testing.assert_allclose(got.value, value, rtol=0, atol=1e-4)
  alone = policy(case).value(model[2], observation())
  np.testing.assert_allclose(alone, got.value, rtol=0, atol=1e-5)


def test_the_regression_head_is_the_published_one(case, model, wanted):
  with torch.no_grad():
    want = model[1](wanted[1].reshape(3, Z, A * D)).numpy()
  own = policy(case, 'l1')
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.jit(own.act)(model[2], observation(), keys)
  np.testing.assert_allclose(x.action.reshape(3, Z, A), want, rtol=0, atol=1e-4)
  command = own.to_env_action(x.action)
  np.testing.assert_allclose(command[..., 0], 2 * want[..., 0], atol=2e-4)
  np.testing.assert_allclose(command[..., 1], want[..., 1], atol=1e-4)
  loss = own.imitation_loss(model[2], observation(), x.action + 0.5, keys)
  np.testing.assert_allclose(loss, 0.5 * Z * A, rtol=1e-5)
  with pytest.raises(ValueError, match='L1 head have no probability'):
    own.evaluate(model[2], observation(), x.action)


def cropped(case, **settings):
  """A policy that sees the central 90 % of pictures."""
  own = config(case, head='token')
  seen = dataclasses.replace(own.openvla.pictures, crop=0.9)
  whole = dataclasses.replace(own.openvla, pictures=seen)
  own = dataclasses.replace(own, openvla=whole)
  return openvla_oft_policy.policy(own, STATS, **settings)


def test_training_sees_changed_pictures_and_nothing_else_does(case, model):
  plain, augmented = cropped(case), cropped(case, augment=True)
  rng = np.random.default_rng(2)
  action = jnp.asarray(rng.uniform(-1, 1, (3, Z * A)), jnp.float32)
  keys = jax.random.split(jax.random.key(0), 3)
  obs = observation()

  def loss(own, obs, **settings):
    run = jax.jit(functools.partial(own.imitation_loss, **settings))
    return np.asarray(run(model[2], obs, action, keys))

  assert (loss(augmented, obs) == loss(plain, obs)).all()
  assert (loss(plain, obs, train=True) == loss(plain, obs)).all()
  # A policy of whole pictures sees those that were changed before.
  change = augmentation.OpenVla()
  images = tuple(
    change(
      pictures.for_crops(image, 10),
      jax.vmap(jax.random.fold_in, (0, None))(keys, i),
    )
    for i, image in enumerate(obs.images)
  )
  want = loss(policy(case), obs._replace(images=images))
  got = loss(augmented, obs, train=True)
  np.testing.assert_allclose(got, want, rtol=1e-4)
  assert np.abs(got - loss(plain, obs)).min() > 1e-3


def test_random_crops_need_a_central_one_elsewhere(case):
  with pytest.raises(ValueError, match='set center_crop = True'):
    policy(case, augment=True)


def test_greedy_actions_are_those_of_torch(case, model, wanted):
  keys = jax.random.split(jax.random.key(0), 3)
  act = jax.jit(functools.partial(policy(case).act, greedy=True))
  want = wanted[0].argmax(-1).numpy() + END - BINS
  got = act(model[2], observation(), keys).action
  np.testing.assert_array_equal(got, want)


def test_recorded_log_probabilities_are_those_of_scoring(case, model):
  own = policy(case, logp_of='token', sampling=sample.Sampling(1.6))
  obs = jax.tree.map(lambda x: jnp.repeat(x, 2, 0), observation())
  keys = jax.random.split(jax.random.key(3), 6)
  x = jax.jit(functools.partial(own.act, group_size=2))(model[2], obs, keys)
  now = jax.jit(own.evaluate)(model[2], x.obs, x.action)
  np.testing.assert_allclose(x.logp, now.logp, rtol=0, atol=1e-5)
  assert ((x.action >= END - BINS) & (x.action < END)).all()
  assert (x.action[::2] != x.action[1::2]).any()
  joint = policy(case, sampling=sample.Sampling(1.6))
  one = jax.tree.map(lambda x: x[3:4], obs)
  alone = joint.act(model[2], one, keys[3:4])
  np.testing.assert_array_equal(alone.action, x.action[3:4])
  np.testing.assert_allclose(alone.logp, x.logp[3:4].sum((1, 2)), atol=1e-5)


def test_a_later_placeholder_changes_an_earlier_action(case, model):
  """Attention is bidirectional: the stop token reaches the first state."""
  first = openvla_oft.action_states(config(case), model[2], observation())
  other = dataclasses.replace(config(case), stop=5)
  second = openvla_oft.action_states(other, model[2], observation())
  assert (np.abs(first - second)[:, 0].max(1) > 1e-3).all()


def test_what_the_model_cannot_read_is_refused(case, model):
  obs = observation()
  act = functools.partial(policy(case).act, model[2])
  keys = jax.random.split(jax.random.key(0), 3)
  with pytest.raises(ValueError, match='reads 2 pictures, and 1 are given'):
    act(obs._replace(images=obs.images[:1]), keys)
  with pytest.raises(ValueError, match='state of 3 numbers, and 0 are given'):
    act(obs._replace(state=()), keys)
  with pytest.raises(ValueError, match="no head 'diffusion'"):
    config(case, head='diffusion')
  with pytest.raises(ValueError, match='actions of 2 numbers, and the stat'):
    openvla_oft_policy.policy(config(case), openvla_test.STATS)
