"""Value and reward models in folders, compared with `transformers`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from stages import base
from stages.language import classifier, huggingface, value_model
from stages.models.files import weights
from stages.models.layers import initialize
from tests.stages.models import families_test
import torch_reference
from torch_reference import prompts, repeat

torch = torch_reference.torch
CLASSIFIER = transformers.AutoModelForSequenceClassification
SMALL = 'qwen3, tied, biases'


def reference(name, folder, auto=CLASSIFIER, labels=1):
  """A random model of `transformers`, written into a folder."""
  model_type, sizes = families_test.CASES[name]
  sizes = sizes | {'num_labels': labels}
  model = torch_reference.dressed(sizes, 0, model_type, auto)
  model.save_pretrained(folder)
  return model


def torch_values(model, prompt, action):
  """The head's output before each token, of padded sequences."""
  token_BP, mask_BP = torch_reference.to_torch(prompt)
  mask_BS = torch.cat([mask_BP, torch.ones(action.shape).long()], 1)
  x_BSD = model.model(
    torch.cat([token_BP, action], 1),
    attention_mask=mask_BS,
    position_ids=torch_reference.positions(mask_BS),
    use_cache=False,
  ).last_hidden_state
  return model.score(x_BSD)[:, token_BP.shape[1] - 1 : -1, 0]


def rows(V, group_size=2, T=5):
  rng = np.random.default_rng(1)
  action = rng.integers(0, V, (3 * group_size, T))
  return action, rng.normal(size=action.shape).astype(np.float32)


@pytest.mark.parametrize(
  'name',
  [SMALL, 'qwen3_moe, three of five experts', 'gemma3, two ropes, untied'],
)
def test_values_and_their_gradients_are_those_of_transformers(name, tmp_path):
  model = reference(name, tmp_path)
  critic = classifier.value_model(tmp_path)
  params, (action, weight) = critic.init(jax.random.key(0)), rows(61)
  config, has_head = classifier.load_config(tmp_path)
  prompt = repeat(prompts(config, [6, 2, 9]), 2)

  def loss(params):
    value = critic.value(params, prompt, jnp.asarray(action), group_size=2)
    return (value * weight).sum(), value

  gradient, value = jax.jit(jax.grad(loss, has_aux=True))(params)
  want = torch_values(model, prompt, torch.tensor(action))
  np.testing.assert_allclose(value, want.detach(), rtol=0, atol=1e-4)
  (want * torch.tensor(weight)).sum().backward()
  got = weights.checkpoint_tensors(
    jax.tree.map(np.asarray, gradient), classifier.names(tmp_path)
  )
  got, want = dict(got), torch_reference.gradients(model)
  assert has_head and got.keys() == want.keys()
  for key, x in want.items():
    assert np.linalg.norm(got[key] - x) <= 1e-4 * np.linalg.norm(x), key


@pytest.mark.parametrize('name', [SMALL, 'llama, untied, llama3'])
def test_a_language_model_gives_a_trunk_with_a_head_of_zeros(name, tmp_path):
  reference(name, tmp_path, transformers.AutoModelForCausalLM)
  critic = classifier.value_model(tmp_path)
  params = critic.init(jax.random.key(0))
  policy = huggingface.policy(tmp_path, response_length=5)
  of_policy = policy.init(jax.random.key(0))
  for key in 'embed_VD', 'norm_D', 'layers':
    jax.tree.map(np.testing.assert_array_equal, params[key], of_policy[key])
  assert params.keys() == {'embed_VD', 'norm_D', 'layers', 'value_D'}
  assert not params['value_D'].any()
  shapes = jax.eval_shape(critic.init, jax.random.key(0))
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
  head = classifier.value_model(tmp_path, trunk='policy')
  assert head.init(jax.random.key(0)).keys() == {'value_D'}


@pytest.mark.slow
@pytest.mark.parametrize('name', families_test.CASES)
def test_scores_of_sequences_are_the_logits_of_transformers(name, tmp_path):
  model = reference(name, tmp_path)
  critic = classifier.reward_model(tmp_path)
  params, lengths = critic.init(jax.random.key(0)), (5, 3, 1, 0)
  prompt = prompts(classifier.load_config(tmp_path)[0], [6, 2, 9, 1])
  action = np.random.default_rng(2).integers(1, 61, (4, 5))
  mask = (np.arange(5) < np.array(lengths)[:, None]).astype(np.float32)
  score = jax.jit(value_model.score_completions(critic))
  got = score(params, prompt, jnp.asarray(action), jnp.asarray(mask))
  for i, n in enumerate(lengths):
    real = np.asarray(prompt.token)[i][np.asarray(prompt.mask)[i] > 0]
    row = torch.tensor(np.append(real, action[i, :n])).long()[None]
    with torch.no_grad():
      want = model(row).logits
    assert want.shape == (1, 1)
    np.testing.assert_allclose(got[i], want[0, 0], rtol=0, atol=1e-4)


def test_a_padded_batch_has_the_logits_of_transformers(tmp_path):
  """Padding by a token of its own, on the right."""
  model = reference(SMALL, tmp_path)
  model.config.pad_token_id = 0
  critic = classifier.reward_model(tmp_path)
  mask = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0], [1] * 6])
  token = np.random.default_rng(3).integers(1, 61, mask.shape) * mask
  with torch.no_grad():
    want = model(torch.tensor(token), attention_mask=torch.tensor(mask)).logits
  prompt = base.Prompt(jnp.asarray(token[:, :1]), jnp.asarray(mask[:, :1]))
  got = jax.jit(value_model.score_completions(critic))(
    critic.init(jax.random.key(0)), prompt, token[:, 1:], mask[:, 1:]
  )
  np.testing.assert_allclose(got, want[:, 0], rtol=0, atol=1e-4)


def test_a_reward_model_in_bfloat16_is_held_in_it_and_scores_the_same(tmp_path):
  reference(SMALL, tmp_path)
  model = classifier.reward_model(tmp_path, dtype='bfloat16')
  config, has_head = classifier.load_config(tmp_path, dtype='bfloat16')
  wide = classifier.load_params(tmp_path, config, has_head)
  params = model.init(jax.random.key(0))
  dtypes = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  assert dtypes(shapes) == dtypes(params)
  for path, x in jax.tree_util.tree_leaves_with_path(params):
    stays = initialize.is_vector(path)
    assert x.dtype == (jnp.float32 if stays else jnp.bfloat16), path
  action, _ = rows(61)
  score = jax.jit(value_model.score_completions(model))
  got, want = (
    score(own, repeat(prompts(config, [6, 2, 9]), 2), action, action >= 0)
    for own in (params, wide)
  )
  np.testing.assert_array_equal(got, want)


def test_a_wrong_folder_is_refused_in_a_sentence(tmp_path):
  reference(SMALL, tmp_path / 'causal', transformers.AutoModelForCausalLM)
  with pytest.raises(weights.CheckpointError, match='no head for rewards'):
    classifier.reward_model(tmp_path / 'causal')
  reference(SMALL, tmp_path / 'three', labels=3)
  for make in classifier.value_model, classifier.reward_model:
    with pytest.raises(weights.CheckpointError, match='classifier of 3 labels'):
      make(tmp_path / 'three')
  reference(SMALL, tmp_path / 'one')
  with pytest.raises(weights.CheckpointError, match="give it trunk='own'"):
    classifier.value_model(tmp_path / 'one', trunk='policy')
  with pytest.raises(ValueError, match="is 'own' or 'policy', not 'both'"):
    classifier.value_model(tmp_path / 'one', trunk='both')
  with pytest.raises(weights.CheckpointError, match='There is no checkpoint'):
    classifier.value_model(tmp_path / 'none')
  path = tmp_path / 'one/config.json'
  config = json.loads(path.read_text())
  path.write_text(json.dumps(config | {'model_type': 'bert'}))
  with pytest.raises(weights.CheckpointError, match="model of type 'bert'"):
    classifier.value_model(tmp_path / 'one')
