"""What our pages are made of: cards, keys, figures, and one style for all.

A page needs nothing but itself: no network, no script.
"""

from collections.abc import Iterable, Mapping
import html
import importlib.resources
import string


def render(template: str, **parts: str) -> str:
  """Fills in a template of this package, and the style that pages share."""
  here = importlib.resources.files('rlinf_jax.report')
  style = (here / 'page.css').read_text(encoding='utf-8')
  text = (here / template).read_text(encoding='utf-8')
  return string.Template(text).substitute(style=style, **parts)


def card(
  title: str, note: str, body: str, now: str = '', size: str = ''
) -> str:
  """A picture or a table with its title; `size` as in the style."""
  return (
    f'<figure class="card {size}"><figcaption><h3>{title}</h3>'
    f'<span class="now">{now}</span><small>{note}</small></figcaption>'
    f'{body}</figure>'
  )


def key(name: str, color: int) -> str:
  """A name beside a patch of color --s`color`."""
  style = f'--c: var(--s{color})'
  return f'<span class="key" style="{style}">{html.escape(name)}</span>'


def legend(colors: Mapping[str, int]) -> str:
  return ' '.join(key(name, color) for name, color in colors.items())


def figures(some: Iterable[tuple[str, str, str]]) -> str:
  """The big numbers on top: of each its label, its value and its kind."""
  return ''.join(
    f'<div class="figure {kind}"><p>{value}</p><span>{label}</span></div>'
    for label, value, kind in some
  )
