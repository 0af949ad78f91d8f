"""Chat templates compute nothing that is too large."""

import json
import time

from jinja2 import sandbox
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


DOUBLED = (
  '{%% set n = namespace(x=messages) %%}{%% for i in range(60) %%}%s'
  '{%% endfor %%}{{ n.x }}'
)
GROWING = {
  'joined': '{% set n.x = n.x ~ n.x %}',
  'added': '{% set n.x = n.x + n.x %}',
  'a list in a list': '{% set n.x = [n.x, n.x] %}',
  'a block': '{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}',
  'a macro': (
    '{% macro m() %}{{ n.x }}{{ n.x }}{% endmacro %}{% set n.x = m() %}'
  ),
  'a filter': '{% set n.x = [n.x, n.x]|join %}',
  'a method': "{% set n.x = ''.join([n.x, n.x]|map('string')) %}",
  'a product': '{% set n.x = n.x|string * 2 %}',
  'a format': "{% set n.x = '%s%s' % (n.x, n.x) %}",
  'braces': "{% set n.x = '{0}{0}'.format(n.x) %}",
  'as JSON': '{% set n.x = [n.x, n.x]|tojson %}',
  'replaced': "{% set n.x = n.x|string|replace('', 'ab') %}",
}
AT_ONCE = [
  "{{ 'a'|center(10 ** 10) }}",
  "{{ 'a'.ljust(10 ** 10) }}",
  "{{ '1'.zfill(10 ** 10) }}",
  "{{ '\t'.expandtabs(10 ** 10) }}",
  "{{ 'a\nb'|indent(10 ** 10) }}",
  "{{ '%10000000000d' % 1 }}",
  "{{ '%*d' % (10 ** 10, 1) }}",
  "{{ '%010000000000.3f'|format(1.0) }}",
  "{{ '{:>10000000000}'.format(1) }}",
  "{{ '{:>{}}'.format(1, 10 ** 10) }}",
  "{{ '{a:>{b}}'.format(a=1, b=10 ** 10) }}",
  "{{ ('a' * 10 ** 6)|replace('a', 'b' * 10 ** 6) }}",
  "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) }}",
  "{{ ('a' * 10 ** 6)|join('b' * 10 ** 6) }}",
  "{{ ('b' * 10 ** 6).join(range(10 ** 5)|map('string')) }}",
  '{{ messages|tojson(indent=10 ** 10) }}',
  "{{ messages|batch(10 ** 10, 'x')|list }}",
  "{{ ('a ' * 10 ** 6)|wordwrap(1, wrapstring='b' * 10 ** 6) }}",
  '{{ 1.5|round(10 ** 10) }}',
  "{{ (5).to_bytes(10 ** 10, 'big') }}",
]
GROWN = [DOUBLED % step for step in GROWING.values()]


@pytest.mark.parametrize('template', [*GROWN, *AT_ONCE])
def test_no_text_or_list_becomes_too_long(template):
  start = time.process_time()
  with pytest.raises(ValueError, match='a text or a list of over 16,777,216'):
    render(template)
  assert time.process_time() - start < 4


def test_other_texts_are_those_of_jinja():
  """Compared with the sandbox without limits."""
  template = """{% macro m(x) %}<{{ x }}>{% endmacro %}
{%- for message in messages -%}
{{ m(message.content|trim) ~ 1 ~ none ~ [1, 'a'] }}
{{ 'a'|center(9) }}|{{ 'a'.ljust(4) }}|{{ '%5.2f' % 1.5 }}|{{ '7'.zfill(3) }}
{{ '%s is %d%%'|format(message.role, 5) }} {{ '{:>4}'.format('x') }}
{{ messages|map(attribute='role')|join(', ') }} {{ '-'.join(['a', 'b']) }}
{{ message|tojson(indent=2) }} {{ 'a\nb'|indent(2) }} {{ 7 % 4 }} {{ 1 + 2 }}
{{ 'aXbX'|replace('X', '..') }} {{ 'a,b'.split(',') + ['c'] }}
{{ 2.567|round(1) }} {{ {'a': 1}.items()|list }}
{% set y %}block {{ message.role|upper }}{% endset %}{{ y }}
{%- endfor %}{{ undefined_name|default('d') }}{{ none }}{{ 3 }}"""
  plain = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True
  )
  plain.filters['tojson'] = lambda x, indent=None: json.dumps(x, indent=indent)
  messages = [{'role': 'user', 'content': 'hi'}]
  want = plain.from_string(template).render(messages=messages)
  assert render(template) == want and 'block USER' in want
