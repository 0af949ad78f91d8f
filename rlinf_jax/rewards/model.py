"""Learned rewards: a classifier that scores a prompt with its completion.

Its arithmetic is a stage of JAX, which a plan may give a place of its own. The
workflow carries its parameters in its state.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jinja2

from rlinf_jax.data import text_arrays
import stages
from stages import base
from stages.language import tokens, value_model, verifiers
from stages.models import classifier


class RewardModel(NamedTuple):
  """A reward model among the rewards of `verifier.verify`.

  Attributes:
    name: in metrics and in plans.
    checkpoint: its folder, with its tokenizer.
    model: its scores of prompts and completions.
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
) -> RewardModel:
  """A reward by a classifier of one label.

  If it has the tokenizer and the chat template of the policy, it reads the
  tokens that the policy has read and written. Otherwise the host puts question
  and completion, as messages of a user and of an assistant, into its own chat
  template and tokenizes them. A line says which.

  Args:
    checkpoint: folder of a `*ForSequenceClassification` of an architecture in
      `families.FAMILIES`, with a tokenizer.
    name: in metrics and in plans.
    length: maximum number of tokens of a conversation that is tokenized again;
      longer ones lose their first tokens.
    dtype: type of the arithmetic; that of the checkpoint if None.

  Raises:
    CheckpointError: for another model, such as a causal language model, or one
      of several labels.
  """
  model = classifier.reward_model(checkpoint, dtype=dtype)
  return RewardModel(name, checkpoint, model, length)


def learned_verifier(
  checkpoint: str,
  host: stages.Stage | None,
  models_and_weights: Sequence[tuple[RewardModel, float]],
  *,
  failed: str,
  decides: bool,
) -> verifiers.LearnedVerifier:
  """Adds the scores of reward models to the verdict of a stage.

  Args:
    checkpoint: folder of the policy's tokenizer.
    host: stage `reference, action, mask -> base.Verdict` of other rewards; None
      without any.
    models_and_weights: reward models, and the weight of each.
    failed: the term of completions that a reward failed on: a score that is not
      finite counts as 0.
    decides: whether completions are correct where the first model's score is
      above 1/2, rather than where `host` says so.
  """
  models, weights = zip(*models_and_weights, strict=True)
  scorers = [_scorer(model, checkpoint) for model in models]

  @stages.stage('add_rewards')
  def add(verdict: base.Verdict, *score_B):
    terms = dict(verdict.terms)
    terms.setdefault(failed, jnp.zeros_like(verdict.reward))
    total_B, correct_B = verdict.reward, verdict.correct
    for model, weight, x_B in zip(models, weights, score_B, strict=True):
      is_bad_B = ~jnp.isfinite(x_B)
      terms[failed] = jnp.maximum(terms[failed], is_bad_B)
      terms[model.name] = jnp.where(is_bad_B, 0.0, x_B).astype(jnp.float32)
      total_B += weight * terms[model.name]
    if decides:
      correct_B = (terms[models[0].name] > 0.5).astype(jnp.float32)
    return verdict._replace(reward=total_B, correct=correct_B, terms=terms)

  @stages.stage('no_rewards')
  def nothing(mask_BT):
    zero_B = jnp.zeros(mask_BT.shape[0], jnp.float32)
    return base.Verdict(zero_B, zero_B, {})

  def init(key):
    keys = jax.random.split(key, len(models))
    return {m.name: m.model.init(k) for m, k in zip(models, keys, strict=True)}

  def verify(params, reference, x: base.Experience):
    if host:
      verdict = host(reference, x.action, x.mask)
    else:
      verdict = nothing(x.mask)
    scores = [
      score(params[model.name], reference, x)
      for model, score in zip(models, scorers, strict=True)
    ]
    return add(verdict, *scores)

  return verifiers.LearnedVerifier(init, verify)


def _scorer(model: RewardModel, checkpoint: str) -> Callable[..., Any]:
  """Returns `params, reference, x -> score_B`, and prints what it reads."""
  policy_tokenizer = tokens.load_tokenizer(checkpoint)
  tokenizer = tokens.load_tokenizer(model.checkpoint)
  if _same(policy_tokenizer, tokenizer):
    print(f'{model.name} reads the tokens of the policy.', flush=True)
    run = value_model.score_completions(model.model)
    stage = stages.Stage(run, model.name, unbatched=(0,))
    return lambda params, reference, x: stage(params, x.obs, x.action, x.mask)
  print(
    f'{model.name} has another tokenizer or chat template than the policy: '
    'questions and completions are tokenized again on the host.',
    flush=True,
  )
  if not tokenizer.chat_template:
    raise ValueError(
      f'The tokenizer of {model.checkpoint} has no chat template, so questions '
      'and completions cannot be put together for it: add the file '
      'chat_template.jinja there.'
    )
  encode = _conversation_stage(model, policy_tokenizer, tokenizer)

  def score_prompt(params, prompt: base.Prompt):
    next_B1 = jnp.zeros((prompt.token.shape[0], 1), prompt.token.dtype)
    return model.model.value(params, prompt, next_B1)[:, 0]

  stage = stages.Stage(score_prompt, model.name, unbatched=(0,))

  def score(params, reference, x: base.Experience):
    return stage(params, encode(reference, x.action, x.mask))

  return score


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
  try:
    text = tokenizer.apply_chat_template(messages, tokenize=False)
  except jinja2.TemplateError as error:
    raise ValueError(
      f'The chat template of {model.checkpoint} refuses a question with its '
      f'completion: {error}.'
    ) from error
  return tokenizer(text, add_special_tokens=False)['input_ids']
