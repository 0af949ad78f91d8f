"""Statistics in the folders of LeRobot's policies, read and written.

LeRobot keeps what it does before and after a model in policy_preprocessor.json
and policy_postprocessor.json, lists of steps. The steps that normalize have the
mode of each type of feature, and their statistics in a file of safetensors, by
names such as `action.mean`. Older folders have them in the file of the weights,
by names such as `unnormalize_outputs.buffer_action.mean`, and the modes in
config.json.
"""

from collections.abc import Mapping
import contextlib
import json
import pathlib
from typing import Any

import numpy as np

from stages.models.files import weights

BEFORE, AFTER = 'policy_preprocessor', 'policy_postprocessor'
NORMALIZE, UNNORMALIZE = 'normalizer_processor', 'unnormalizer_processor'
RELATIVE, ABSOLUTE = 'relative_actions_processor', 'absolute_actions_processor'
# The feature of each part of statistics, its type, and the buffers of older
# folders.
PARTS = {
  'state': ('observation.state', 'STATE', 'normalize_inputs'),
  'actions': ('action', 'ACTION', 'unnormalize_outputs'),
}
BUFFERS = 'normalize_inputs.', 'normalize_targets.', 'unnormalize_outputs.'
EPSILON = 1e-8  # Of LeRobot, where a folder tells none.
OPENPI_EPSILON = 1e-6  # Added to a standard deviation, or to q99 − q01.
# Most tokens of an instruction, by whether the model is π0.5.
MAX_LENGTH = {False: 48, True: 200}
# Entries that say something else of a part, such as its number of steps.
NO_STATISTICS = 'relative', 'shape', 'mask', 'count'
WORDS = {
  'task_key': 'task',
  'padding_side': 'right',
  'padding': 'max_length',
  'truncation': True,
  'tokenizer_name': 'google/paligemma-3b-pt-224',
}


def read(folder: str | pathlib.Path) -> dict[str, Any] | None:
  """The statistics of a folder.

  Returns:
    Statistics of 'state' and 'actions' as `normalization.of` reads them, each
    with its 'mode'. Relative actions have 'relative', whether each number is.
    None if the folder has none.

  Raises:
    CheckpointError: if its files are not LeRobot's.
  """
  folder = pathlib.Path(folder)
  try:
    if (folder / f'{BEFORE}.json').is_file():
      return _of_steps(folder, _steps(folder, BEFORE), _steps(folder, AFTER))
    return _from_buffers(folder)
  except weights.CheckpointError:
    raise
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise weights.CheckpointError(
      f'{folder} has settings of statistics, in {BEFORE}.json, {AFTER}.json or '
      f"config.json, that are not LeRobot's ({error}): copy it again."
    ) from error


def _of_steps(folder: pathlib.Path, before: Mapping, after: Mapping):
  """Statistics as the steps before and after a model have them."""
  found = {}
  for part, step in (
    ('state', before.get(NORMALIZE)),
    ('actions', after.get(UNNORMALIZE)),
  ):
    entry = _of_step(folder, part, step)
    if entry is not None:
      found[part] = entry
  relative = _config(before.get(RELATIVE))
  if relative.get('enabled') and 'actions' in found:
    found['actions']['relative'] = _mask(relative, width(found['actions']))
  return found or None


def is_buffer(name: str) -> bool:
  """Whether a tensor of a file of weights is a statistic."""
  return name.startswith(BUFFERS)


def write(
  folder: str | pathlib.Path,
  norm_stats: Mapping,
  *,
  adaptive: bool,
):
  """Writes the processors of a π0 or π0.5.

  Args:
    folder: of the model.
    norm_stats: statistics, as `read` returns them.
    adaptive: whether the model is π0.5, whose statistics are by quantiles where
      they have no mode; else they are by mean and standard deviation.
  """
  folder = pathlib.Path(folder)
  features, modes = describe(norm_stats, adaptive=adaptive)
  tensors = _tensors_of(norm_stats)
  actions = norm_stats['actions']
  relative = actions.get('relative')
  common = {'eps': actions.get('eps', OPENPI_EPSILON), 'norm_map': modes}
  normalize = NORMALIZE, {**common, 'features': features}
  unnormalize = UNNORMALIZE, {**common, 'features': _only_action(features)}
  device = 'device_processor', {'device': 'cpu', 'float_dtype': None}
  subtract = RELATIVE, relative_config(actions)
  before = [
    ('rename_observations_processor', {'rename_map': {}}),
    ('to_batch_processor', {}),
  ]
  words = 'tokenizer_processor', WORDS | {'max_length': MAX_LENGTH[adaptive]}
  if adaptive:  # Its text has the normalized state.
    text = 'pi05_prepare_state_tokenizer_processor_step', {}
    before += [subtract, normalize, text, words, device]
  else:
    text = 'pi0_new_line_processor', {}
    before += [text, words, device, subtract, normalize]
  _write_steps(folder, BEFORE, before, tensors)
  after = [unnormalize, (ABSOLUTE, {'enabled': bool(relative)}), device]
  _write_steps(folder, AFTER, after, tensors)


def describe(norm_stats: Mapping, *, adaptive: bool) -> tuple[dict, dict]:
  """LeRobot's features of statistics, and the mode of each type of feature.

  Arguments are those of `write`.
  """
  features, modes = {}, {'VISUAL': 'IDENTITY'}
  for part, (name, kind, _) in PARTS.items():
    if part not in norm_stats:
      continue
    entry = norm_stats[part]
    modes[kind] = entry.get('mode', 'QUANTILES' if adaptive else 'MEAN_STD')
    features[name] = {'type': kind, 'shape': [width(entry)]}
  return features, modes


def _tensors_of(norm_stats: Mapping) -> dict[str, np.ndarray]:
  """The statistics by LeRobot's names."""
  return {
    f'{name}.{key}': np.array(x, np.float32)
    for part, (name, _, _) in PARTS.items()
    for key, x in norm_stats.get(part, {}).items()
    if isinstance(x, list) and key not in NO_STATISTICS
  }


def _only_action(features: Mapping) -> dict:
  return {k: x for k, x in features.items() if k == PARTS['actions'][0]}


def relative_config(actions: Mapping) -> dict[str, Any]:
  """Settings of the step, which excludes numbers by their names.

  Args:
    actions: statistics of actions.
  """
  relative = actions.get('relative')
  names = [f'{i:03}' for i in range(width(actions))]
  chosen = relative or [True] * len(names)
  excluded = [x for x, own in zip(names, chosen, strict=True) if not own]
  return {
    'enabled': bool(relative),
    'exclude_joints': excluded,
    'action_names': names,
  }


def _write_steps(folder: pathlib.Path, name: str, steps, tensors):
  """Writes a list of steps, and the statistics of those that normalize."""
  from safetensors import numpy as safetensors

  listed = []
  for i, (step, config) in enumerate(steps):
    listed.append({'registry_name': step, 'config': config})
    if step in (NORMALIZE, UNNORMALIZE) and tensors:
      file = f'{name}_step_{i}_{step}.safetensors'
      listed[-1]['state_file'] = file
      safetensors.save_file(tensors, folder / file)
  text = json.dumps({'name': name, 'steps': listed}, indent=2)
  (folder / f'{name}.json').write_text(text)


def _steps(folder: pathlib.Path, name: str) -> dict[str, Mapping]:
  """The steps of a list by their registered names."""
  path = folder / f'{name}.json'
  if not path.is_file():
    return {}
  raw = weights.read_json(path)
  steps = raw.get('steps') if isinstance(raw, Mapping) else None
  if not isinstance(steps, list) or not all(
    isinstance(x, Mapping) for x in steps
  ):
    raise weights.CheckpointError(
      f"{path} holds {raw!r:.60}, expected an object with 'steps': copy it "
      'again.'
    )
  return {x.get('registry_name', ''): x for x in steps}


def _config(step: Mapping | None) -> Mapping:
  found = (step or {}).get('config')
  return found if isinstance(found, Mapping) else {}


def _of_step(folder: pathlib.Path, part: str, step: Mapping | None):
  """Statistics of a part as a step has them; None without its feature."""
  if step is None:
    return None
  name, kind, _ = PARTS[part]
  config, file = _config(step), step.get('state_file')
  mode = str((config.get('norm_map') or {}).get(kind, 'IDENTITY'))
  found = {}
  if file is not None:
    found = _tensors(folder, str(file), f'{name}.')
  feature = (config.get('features') or {}).get(name)
  if not found and feature is None:
    return None
  if mode == 'IDENTITY' or not found:  # LeRobot leaves both as they are.
    mode = 'IDENTITY'
    if feature is not None:
      found['shape'] = [int(x) for x in feature['shape']]
  return {'mode': mode, 'eps': float(config.get('eps', EPSILON)), **found}


def _tensors(folder: pathlib.Path, file: str, prefix: str) -> dict[str, list]:
  import safetensors

  path = folder / pathlib.PurePath(file).name
  try:
    with safetensors.safe_open(path, framework='numpy') as opened:
      return {
        key.removeprefix(prefix): opened.get_tensor(key).ravel().tolist()
        for key in opened.keys()
        if key.startswith(prefix)
      }
  except (OSError, safetensors.SafetensorError) as error:
    raise weights.CheckpointError(
      f'{path}, which has the statistics of {folder}, cannot be read '
      f'({error}): copy it again.'
    ) from error


def _from_buffers(folder: pathlib.Path) -> dict[str, Any] | None:
  """Statistics among the weights, of older folders."""
  if not any((folder / x).is_file() for x in (weights.SINGLE, weights.INDEX)):
    return None
  found: dict[str, dict[str, Any]] = {}
  with contextlib.ExitStack() as stack:
    files = weights.TensorFiles(folder, stack)
    for part, (feature, _, owner) in PARTS.items():
      prefix = f'{owner}.buffer_{feature.replace(".", "_")}.'
      entry = {
        name.removeprefix(prefix): opened.get_tensor(name).ravel().tolist()
        for name, opened in files.file_of.items()
        if name.startswith(prefix)
      }
      if entry:
        found[part] = entry
  if not found:
    return None
  path = folder / 'config.json'
  config = weights.read_json(path) if path.is_file() else {}
  modes = config.get('normalization_mapping') or {}
  for part, entry in found.items():
    usual = 'MEAN_STD' if 'mean' in entry else 'MIN_MAX'
    entry |= {'mode': modes.get(PARTS[part][1], usual), 'eps': EPSILON}
  return found


def _mask(config: Mapping, width: int) -> list[bool]:
  """Whether each number of an action is relative, as LeRobot decides it."""
  names = config.get('action_names')
  excluded = [str(x).lower() for x in config.get('exclude_joints') or () if x]
  if not names or not excluded:
    return [True] * width
  mask = [
    not any(part in str(name).lower() for part in excluded)
    for name in names[:width]
  ]
  return mask + [True] * (width - len(mask))


def width(entry: Mapping) -> int:
  """The length of the vector that statistics describe."""
  for key, x in entry.items():
    if key == 'shape':
      return int(x[-1])
    if isinstance(x, list) and key not in NO_STATISTICS:
      return len(x)
  raise ValueError(f'There are no statistics among {[*entry]}.')
