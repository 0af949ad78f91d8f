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
