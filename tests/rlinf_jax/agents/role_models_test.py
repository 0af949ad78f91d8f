"""Models of several roles are written beside each other."""

from rlinf_jax.agents import role_models


def test_each_role_has_a_folder(tmp_path):
  written = {}

  def write(path, params):
    assert path.parent.is_dir()
    written[path] = params

  role_models.export(tmp_path / 'model', {'one': 1, 'two': 2}, write=write)
  assert written == {tmp_path / 'model/one': 1, tmp_path / 'model/two': 2}
