"""Learned rewards: a classifier that scores a prompt with its completion.

The forward pass is a stage of JAX, which a plan may give a place of its own.
The workflow carries the parameters in its state.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlinf_jax.data import chat_template, text_arrays
import stages
from stages import base, ranges
from stages.language import classifier, tokens, value_model, verifiers


class RewardModel(NamedTuple):
  """A reward model among the rewards of `verifier.verify`.

  Attributes:
    name: its name in metrics and in plans.
    checkpoint: its folder, with its tokenizer.
    model: the model that scores prompts and completions.
    length: maximum number of tokens of a conversation that is tokenized again.
  """

  name: str
  checkpoint: str
  model: value_model.ValueModel
  length: int


def reward_model(
  checkpoint: str,
  *,
  name: str = 'reward_model',
  length: int = 2048,
  dtype: str | None = None,
  packed_tokens: ranges.PositiveInt | None = None,
) -> RewardModel:
  """A reward by a classifier of one label.

  If it has the tokenizer and the chat template of the policy, it reads the
  tokens of the prompt and of the completion unchanged. Otherwise the host puts
  the question and the completion into the reward model's chat template, as
  messages of a user and of an assistant, and tokenizes them again. A line of
  output says which of the two applies.

  Args:
    checkpoint: folder of a `*ForSequenceClassification` of an architecture in
      `families.FAMILIES`, with a tokenizer.
    name: its name in metrics and in plans.
    length: maximum number of tokens of a conversation that is tokenized again;
      longer conversations lose their first tokens.
    dtype: as in `huggingface.load_config`.
    packed_tokens: tokens of a packed row, which holds several conversations
      without padding: at least the most of a prompt and of its completion
      together, or `length` where they are tokenized again. None for a row each.

  Raises:
    CheckpointError: for any other model, such as a causal language model or a
      classifier of several labels.
  """
  model = classifier.reward_model(
    checkpoint, dtype=dtype, packed_tokens=packed_tokens
  )
  return RewardModel(name, checkpoint, model, length)


def scorer(
  reward: RewardModel, checkpoint: str, weight: float
) -> verifiers.Scorer:
  """A reward model that scores a policy; prints which tokens it reads.

  Args:
    reward: the reward model.
    checkpoint: folder of the policy's tokenizer.
    weight: its weight in the sum of rewards.
  """
  policy_tokenizer = tokens.load_tokenizer(checkpoint)
  tokenizer = tokens.load_tokenizer(reward.checkpoint)
  if _same(policy_tokenizer, tokenizer):
    print(f'{reward.name} reads the tokens of the policy.', flush=True)
    return verifiers.scorer(reward.name, reward.model, weight)
  print(
    f'{reward.name} has another tokenizer or chat template than the policy: '
    'questions and completions are tokenized again on the host.',
    flush=True,
  )
  if not tokenizer.chat_template:
    raise ValueError(
      f'The tokenizer of {reward.checkpoint} has no chat template, so '
      'questions and completions cannot be put together for it: add the file '
      'chat_template.jinja there.'
    )
  encode = _conversation_stage(reward, policy_tokenizer, tokenizer)

  def score_prompt(params, prompt: base.Prompt):
    next_B1 = jnp.zeros((prompt.token.shape[0], 1), prompt.token.dtype)
    mask_B1 = jnp.ones_like(next_B1)
    return reward.model.value(params, prompt, next_B1, mask=mask_B1)[:, 0]

  stage = stages.Stage(score_prompt, reward.name, unbatched=(0,))

  def score(params, reference, x: base.Experience):
    return stage(params, encode(reference, x.action, x.mask))

  return verifiers.Scorer(reward.name, reward.model.init, score, weight)


def _same(one, other) -> bool:
  """Whether two tokenizers make the same tokens of a conversation."""
  return (
    one.chat_template == other.chat_template
    and one.get_vocab() == other.get_vocab()
    and one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
  )


def _conversation_stage(
  model: RewardModel, policy_tokenizer, tokenizer
) -> stages.Stage:
  """Returns `reference, action, mask -> Prompt`, on the host."""

  def run(reference: text_arrays.Reference, action_BT, mask_BT):
    rows = [
      _conversation(tokenizer, model, question, completion)[-model.length :]
      for question, completion in zip(
        text_arrays.unpack(reference.question),
        tokens.decode(policy_tokenizer, action_BT, mask_BT),
        strict=True,
      )
    ]
    return tokens.pad_left(rows, model.length)

  def out_shapes(reference, action, mask):
    del reference, mask
    shape = jax.ShapeDtypeStruct((action.shape[0], model.length), jnp.int32)
    return base.Prompt(shape, shape)

  return stages.Stage(
    run, f'{model.name}_tokens', host=True, out_shapes=out_shapes
  )


def _conversation(tokenizer, model: RewardModel, question, completion):
  """Tokens of a question and its completion in a tokenizer's chat template."""
  messages = [
    {'role': 'user', 'content': question},
    {'role': 'assistant', 'content': completion},
  ]
  text = chat_template.render(
    tokenizer, messages, 'a question with its completion'
  )
  return tokenizer(text, add_special_tokens=False)['input_ids']
