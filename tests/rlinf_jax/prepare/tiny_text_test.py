"""A tiny model of text, and files of sums for it."""

import jax
import numpy as np

from rlinf_jax.data import questions, text_arrays
from rlinf_jax.prepare import tiny_text
from stages.language import huggingface


def test_the_model_reads_the_questions_and_may_answer_them(tmp_path):
  tiny_text.model(tmp_path / 'model')
  tiny_text.write(tmp_path)
  model = str(tmp_path / 'model')
  source = questions.questions(
    model,
    train=str(tmp_path / 'train.jsonl'),
    held_out=str(tmp_path / 'test.jsonl'),
    batch_size=42,
    prompt_length=8,
  )
  _, batch = source.next(source.init(0), {})
  (held_out,) = source.held_out()
  asked = []
  for problem in (batch, held_out):
    rows = zip(
      text_arrays.unpack(problem.answer.question),
      text_arrays.unpack(problem.answer.answer),
      strict=True,
    )
    for question, answer in rows:
      a, b = question.removesuffix('=').split('+')
      assert int(a) + int(b) == int(answer) < 10
      asked.append(question)
  assert len(set(asked)) == len(asked) == 55
  # An answer that random weights hardly ever give would not be learned.
  policy = huggingface.policy(model, response_length=1)
  key = jax.random.key(0)
  found = policy.evaluate(
    policy.init(key), batch.prompt, batch.prompt.token[:, -1:]
  )
  assert np.exp(found.logp).min() > 0.01
