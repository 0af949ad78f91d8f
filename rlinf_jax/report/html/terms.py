"""Words of a plan's page, with what they mean when the pointer is on them."""

import html

MEANINGS = {
  'stage': 'A named function over a batch, such as generate or gradient: the '
  'unit that a plan places and cuts.',
  'place': 'Devices, seen as one mesh, that run the stages assigned to them.',
  'piece': 'One of the equal parts into which a plan cuts the batch of a step, '
  'so that places work at the same time.',
  'grain': "How finely a stage's batch may be cut.",
  'slack': 'How much longer a stage could take without slowing the step.',
  'measured': 'Timed on these devices.',
  'modeled': 'Computed from counted work and the rates of the hardware.',
  'assumed': 'Not measured, and no work was counted: a guess.',
  'compiled': "Read from the compiler's result.",
  'row': 'Rows in, rows out: the batch may be cut between any groups of rows.',
  'sum': 'Rows in, sums out: the sums of all parts are added up.',
  'split': 'Splits the rows of a batch.',
  'slice': 'Passes some rows of a batch on.',
  'batch': 'Needs the whole batch at once: a barrier.',
}


def term(word: str) -> str:
  """A word as HTML that shows its meaning; plurals have that of their noun."""
  noun = word.lower()
  meaning = MEANINGS.get(noun) or MEANINGS.get(noun.removesuffix('s'))
  if not meaning:
    return html.escape(word)
  return f'<abbr title="{html.escape(meaning)}">{html.escape(word)}</abbr>'
