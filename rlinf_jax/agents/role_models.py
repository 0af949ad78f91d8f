"""Models of several roles, as folders beside each other."""

from collections.abc import Callable, Mapping
import pathlib

from stages import base


def export(
  folder: str | pathlib.Path,
  params: Mapping[str, base.Params],
  *,
  write: Callable,
):
  """Writes the model of each role into a folder of its name.

  Args:
    folder: folder to write.
    params: parameters by role, as those of `workflows.role_grpo`.
    write: `folder, params -> None` of one model, such as `huggingface.export`.
  """
  for name, of_role in params.items():
    path = pathlib.Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, of_role)


def checkpoint(folder: str | pathlib.Path, role: str) -> str:
  """The folder of a role's model.

  Args:
    folder: that of one model, which is then the model of every role, or one
      with a model for each role, as `export` writes it.
    role: name of the role.

  Raises:
    FileNotFoundError: if the folder has neither.
  """
  folder = pathlib.Path(folder)
  of_role = folder / role
  for path in (of_role, folder):
    if (path / 'config.json').exists():
      return str(path)
  raise FileNotFoundError(
    f'{folder} has neither a model (config.json) nor one of the role {role} '
    f'({of_role / "config.json"}): give the folder of one model for all roles, '
    "or that of a run's models, such as runs/mine/model."
  )
