"""OpenVLA, compared with published blocks in torch in the published order."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import base
from stages.language import sample
from stages.models import families
from stages.models.files import weights
from stages.models.files.naming import Tensor
from stages.models.vision import names
from stages.vla import pictures
from stages.vla.openvla import action_tokens, openvla, openvla_policy

torch = pytest.importorskip('torch', reason='Reference models need torch.')

import transformers  # noqa: E402

A, BINS, PADDED, V = 4, 16, 8, 61
END = V - PADDED
STATS = action_tokens.ActionStats(
  np.float32([-2, 0, -1, 0]),
  np.float32([2, 3, 1, 1]),
  np.array([True, True, True, False]),
)
PROJECTOR = {
  f'{ours}_{letters}': Tensor(f'fc{i}.weight', 1)
  for i, ours, letters in (
    (1, 'in', 'OF'),
    (2, 'middle', 'FD'),
    (3, 'out', 'OD'),
  )
} | {
  f'{ours}_bias_{letter}': Tensor(f'fc{i}.bias')
  for i, ours, letter in ((1, 'in', 'F'), (2, 'middle', 'D'), (3, 'out', 'D'))
}


class Projector(torch.nn.Module):
  """The projector of two towers: fc1, GELU, fc2, GELU, fc3."""

  def __init__(self, features, width):
    super().__init__()
    self.fc1 = torch.nn.Linear(features, 4 * features)
    self.fc2 = torch.nn.Linear(4 * features, width)
    self.fc3 = torch.nn.Linear(width, width)

  def forward(self, x):
    gelu = torch.nn.functional.gelu
    return self.fc3(gelu(self.fc2(gelu(self.fc1(x)))))


class Case(NamedTuple):
  """The same model in torch, part by part, and in JAX."""

  torch: Any
  config: openvla.Config
  params: Any


def parts():
  """Random blocks, in which every bias, scale and token matters."""
  torch.manual_seed(0)
  tower = {'image_size': 10, 'patch_size': 5, 'num_hidden_layers': 2}
  found = {
    'dino': transformers.Dinov2WithRegistersModel(
      transformers.Dinov2WithRegistersConfig(
        hidden_size=8,
        num_attention_heads=2,
        mlp_ratio=2,
        num_register_tokens=2,
        **tower,
      )
    ),
    'siglip': transformers.SiglipVisionModel(
      transformers.SiglipVisionConfig(
        hidden_size=6,
        num_attention_heads=2,
        intermediate_size=11,
        hidden_act='gelu',
        **tower,
      )
    ),
    'projector': Projector(14, 12),
    'llama': transformers.LlamaForCausalLM(
      transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=17,
        tie_word_embeddings=False,
        rope_parameters={'rope_type': 'default', 'rope_theta': 100.0},
      )
    ),
  }
  with torch.no_grad():
    for part in found.values():
      for parameter in part.eval().parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
  return found


@pytest.fixture(scope='module')
def case(tmp_path_factory):
  from safetensors import torch as st

  found, folder = parts(), tmp_path_factory.mktemp('parts')
  towers = {
    name: names.of_transformers(found[name].config.to_dict())
    for name in ('dino', 'siglip')
  }
  llama = families.read(found['llama'].config.to_dict(), 'config.json')
  config = openvla.Config(
    **towers,
    llama=llama,
    padded=PADDED,
    bins=BINS,
    pictures=pictures.Pictures(sizes=(10, 10)),
  )
  params, shapes = {}, openvla.param_shapes(config)
  tensors = {
    'dino': names.DINOV2,
    'siglip': names.SIGLIP,
    'projector': PROJECTOR,
    'llama': families.FAMILIES['llama'].names,
  }
  for name, part in found.items():
    (folder / name).mkdir()
    if name == 'projector':
      st.save_file(part.state_dict(), folder / name / weights.SINGLE)
    else:
      part.save_pretrained(folder / name)
    stored = st.load_file(folder / name / weights.SINGLE)
    unread = frozenset(
      n
      for n in stored
      if name in towers
      and any(x in n for x in ('.1.', 'layernorm.', 'head.', 'mask_token'))
      and 'layers.0.' not in n
      and 'layer.0.' not in n
    )
    params[name] = weights.load(
      folder / name, shapes[name], tensors[name], ignored=unread
    )
  value_D = jax.random.normal(jax.random.key(1), (12,))
  return Case(found, config, params | {base.CRITIC: {'value_D': value_D}})


def observation(lengths=(5, 3, 5)):
  """Pictures of another size than the towers', prompts padded on the right."""
  rng = np.random.default_rng(0)
  B, P = len(lengths), max(lengths)
  token = rng.integers(3, END - BINS, (B, P))
  mask = np.arange(P)[None] < np.array(lengths)[:, None]
  image = rng.integers(0, 256, (B, 17, 13, 3), np.uint8)
  prompt = base.Prompt(
    jnp.asarray(token, jnp.int32), jnp.asarray(mask, jnp.int32)
  )
  return openvla_policy.Observation(jnp.asarray(image), prompt)


def reference_patches(case, image):
  """Projected patches of one picture, by Pillow and torch."""
  from PIL import Image

  picture = Image.fromarray(np.asarray(image))
  # One after the other: Pillow 13 would choose the order by the shape.
  small = picture.resize((10, picture.height), Image.BICUBIC)
  small = small.resize((10, 10), Image.BICUBIC)
  x = torch.tensor(np.asarray(small)).permute(2, 0, 1)[None] / 255.0
  normalized = lambda mean, std: (
    (x - torch.tensor(mean)[None, :, None, None])
    / torch.tensor(std)[None, :, None, None]
  )
  inputs = {
    'dino': normalized(pictures.IMAGENET_MEAN, pictures.IMAGENET_STD),
    'siglip': normalized(pictures.HALF, pictures.HALF),
  }
  prefix = {'dino': 3, 'siglip': 0}
  seen = [
    case.torch[name](x, output_hidden_states=True).hidden_states[-2]
    for name, x in inputs.items()
  ]
  seen = [x[:, n:] for x, n in zip(seen, prefix.values(), strict=True)]
  return case.torch['projector'](torch.cat(seen, -1))


def reference(case, obs, action):
  """Logits of action tokens and the last states, row by row, unpadded."""
  llama, logits, states = case.torch['llama'], [], []
  for b in range(len(action)):
    length = int(obs.prompt.mask[b].sum())
    token = np.concatenate([obs.prompt.token[b, :length], action[b, :-1]])
    x = llama.get_input_embeddings()(torch.tensor(token).long())[None]
    x = torch.cat(
      [x[:, :1], reference_patches(case, obs.image[b]), x[:, 1:]], 1
    )
    result = llama(inputs_embeds=x, output_hidden_states=True)
    logits.append(result.logits[0, -A:, END - BINS : END])
    states.append(result.hidden_states[-1][0, -A])
  return torch.stack(logits), torch.stack(states)


def policy(case, **kwargs):
  return openvla_policy.policy(case.config, STATS, **kwargs)


def random_actions(rows):
  rng = np.random.default_rng(2)
  return jnp.asarray(rng.integers(END - BINS, END, (rows, A)), jnp.int32)


def test_patches_are_those_of_the_published_blocks(case):
  obs = observation()
  got = openvla.embed_patches(case.config, case.params, obs.image)
  with torch.no_grad():
    want = torch.cat([reference_patches(case, x) for x in obs.image])
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_scores_and_values_are_those_of_the_published_order(case):
  obs, action = observation(), random_actions(3)
  with torch.no_grad():
    logits, state = reference(case, obs, np.asarray(action))
  want = torch.log_softmax(logits, -1)
  chosen = torch.tensor(np.asarray(action)).long() - (END - BINS)
  logp = want.gather(-1, chosen[..., None])[..., 0]
  got = jax.jit(policy(case, logp_of='token').evaluate)(
    case.params, obs, action
  )
  np.testing.assert_allclose(got.logp[:, 0], logp, rtol=0, atol=1e-4)
  entropy = -(want.exp() * want).sum(-1)
  np.testing.assert_allclose(got.entropy[:, 0], entropy, rtol=0, atol=1e-4)
  value = state.numpy() @ np.asarray(case.params[base.CRITIC]['value_D'])
  np.testing.assert_allclose(got.value, value, rtol=0, atol=1e-4)
  alone = policy(case).value(case.params, obs)
  np.testing.assert_allclose(alone, got.value, rtol=0, atol=1e-5)
  joint = policy(case).evaluate(case.params, obs, action)
  np.testing.assert_allclose(joint.logp, got.logp[:, 0].sum(1), rtol=1e-6)


def test_greedy_actions_are_those_of_torch(case):
  obs = observation()
  action = np.zeros((3, A), np.int64)
  with torch.no_grad():
    for t in range(A):
      logits, _ = reference(case, obs, action)
      action[:, t] = logits[:, t].argmax(-1).numpy() + END - BINS
  keys = jax.random.split(jax.random.key(0), 3)
  act = jax.jit(functools.partial(policy(case).act, greedy=True))
  np.testing.assert_array_equal(act(case.params, obs, keys).action, action)


def test_recorded_log_probabilities_are_those_of_scoring(case):
  sampling = sample.Sampling(temperature=0.6)
  own = policy(case, logp_of='token', sampling=sampling)
  obs = jax.tree.map(lambda x: jnp.repeat(x, 2, 0), observation())
  keys = jax.random.split(jax.random.key(3), 6)
  x = jax.jit(functools.partial(own.act, group_size=2))(case.params, obs, keys)
  for group_size in 1, 2:
    evaluate = functools.partial(own.evaluate, group_size=group_size)
    now = jax.jit(evaluate)(case.params, x.obs, x.action)
    np.testing.assert_allclose(x.logp, now.logp, rtol=0, atol=1e-5)
  assert ((x.action >= END - BINS) & (x.action < END)).all()
  assert len({tuple(row) for row in np.asarray(x.action)}) > 2
  # A row's action follows from its own key.
  one = jax.tree.map(lambda x: x[3:4], obs)
  alone = own.act(case.params, one, keys[3:4])
  np.testing.assert_array_equal(alone.action, x.action[3:4])


def test_narrow_arithmetic_asks_for_log_probabilities_of_the_trainer(case):
  narrow = dataclasses.replace(case.config.llama, dtype='bfloat16')
  config = dataclasses.replace(case.config, llama=narrow)
  own = openvla_policy.policy(config, STATS)
  assert own.recompute_logp and not policy(case).recompute_logp
  keys = jax.random.split(jax.random.key(3), 3)
  x = own.act(case.params, observation(), keys)
  want = policy(case).evaluate(case.params, x.obs, x.action).logp
  np.testing.assert_allclose(x.logp, want, rtol=0, atol=0.3)


def test_every_parameter_that_is_read_has_a_gradient(case):
  own, obs = policy(case), observation()

  def loss(params):
    now = own.evaluate(params, obs, random_actions(3))
    return (now.logp + now.value).sum()

  gradient = jax.jit(jax.grad(loss))(case.params)
  for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
    assert (np.asarray(leaf) != 0).any(), path


def test_towers_of_different_grids_are_refused(case):
  dino = dataclasses.replace(case.config.dino, image_size=20)
  with pytest.raises(ValueError, match='DINOv2 has 4 patches along an edge'):
    dataclasses.replace(case.config, dino=dino)
