"""Chat templates compute nothing that is too large."""

import time

import pytest
from transformers.utils import chat_template_utils

from rlinf_jax.data import chat_template


class Tokenizer:
  """A tokenizer that renders a template, without a vocabulary."""

  name_or_path = 'model'

  def __init__(self, template):
    self.chat_template = template

  def apply_chat_template(self, messages, tokenize, **kwargs):
    (text,), _ = chat_template_utils.render_jinja_template(
      conversations=[messages], chat_template=self.chat_template, **kwargs
    )
    return text


def render(template):
  messages = [{'role': 'user', 'content': 'hi'}]
  return chat_template.render(Tokenizer(template), messages, 'them')


@pytest.mark.parametrize(
  ('template', 'why'),
  [
    ("{{ 'a' * 1500000000 }}", 'text or a list of over 16,777,216'),
    ("{{ (1500000000 * 'a')|length }}", 'text or a list of over'),
    ('{% set x = messages * 10 ** 9 %}', 'text or a list of over'),
    (
      '{% set n = messages|length + 2 %}{{ (n ** 6000000) % 7 }}',
      '65,536 bits',
    ),
    ('{{ (3 ** 30000) * (3 ** 30000) % 7 }}', '65,536 bits'),
  ],
)
def test_products_and_powers_that_are_too_large_are_refused(template, why):
  start = time.process_time()
  with pytest.raises(ValueError, match=f'model refuses them: .*{why}'):
    render(template)
  assert time.process_time() - start < 1


def test_other_products_and_powers_are_those_of_python():
  text = "{{ '-' * 3 }}{{ 3 ** 4 }} {{ 2 * 3.5 }} {{ 2 ** -1 }} {{ ([1] * 2) }}"
  assert render(text) == '---81 7.0 0.5 [1, 1]'
  assert render("{{ '-' * -1 }}{{ messages[0].content * 2 }}") == 'hihi'
