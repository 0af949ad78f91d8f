"""A file is replaced as a whole, or stays as it was."""

import pytest

from rlinf_jax.system import whole_file


def test_a_file_is_replaced(tmp_path):
  path = tmp_path / 'plan.json'
  for text in ('old', 'π'):
    whole_file.write_text(path, text)
    assert path.read_text(encoding='utf-8') == text
  assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize('error', [OSError(28, 'full'), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_the_earlier_file(error, tmp_path):
  path = tmp_path / 'plan.json'
  path.write_text('old')

  def write(part):
    part.write_text('ha')
    raise error

  with pytest.raises(type(error)), whole_file.replaced(path) as part:
    write(part)
  assert path.read_text() == 'old'
  assert [*tmp_path.iterdir()] == [path]
