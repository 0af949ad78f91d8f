"""Parts of HTML pages: cards, legends, key figures, and a shared style.

Pages are self-contained: they load nothing and run no scripts.
"""

from collections.abc import Iterable, Mapping
import html
import importlib.resources
import string


def render(template: str, **parts: str) -> str:
  """Fills in a template of this package; the shared style is added."""
  folder = importlib.resources.files('rlinf_jax.report.html')
  style = (folder / 'page.css').read_text(encoding='utf-8')
  text = (folder / template).read_text(encoding='utf-8')
  return string.Template(text).substitute(style=style, **parts)


def card(
  title: str, note: str, body: str, value: str = '', size: str = ''
) -> str:
  """A picture or a table in a frame.

  Args:
    title: of the card.
    note: small text below the title.
    body: HTML of the picture or the table.
    value: shown beside the title, such as the last value of a metric.
    size: CSS class of the width.
  """
  return (
    f'<figure class="card {size}"><figcaption><h3>{title}</h3>'
    f'<span class="value">{value}</span><small>{note}</small></figcaption>'
    f'{body}</figure>'
  )


def legend_entry(name: str, color: int) -> str:
  """A name beside a patch of the color --s`color`."""
  style = f'--c: var(--s{color})'
  return f'<span class="key" style="{style}">{html.escape(name)}</span>'


def legend(colors: Mapping[str, int]) -> str:
  """Names beside their colors."""
  return ' '.join(legend_entry(name, color) for name, color in colors.items())


def key_figures(figures: Iterable[tuple[str, str, str]]) -> str:
  """The large numbers at the top of a page.

  Args:
    figures: of each its label, its value as HTML, and its CSS class.
  """
  return ''.join(
    f'<div class="figure {kind}"><p>{value}</p><span>{label}</span></div>'
    for label, value, kind in figures
  )
