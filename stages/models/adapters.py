"""Adapters as PEFT writes and reads them: a configuration and one file."""

from collections.abc import Callable
import dataclasses
import json
import math
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stages import base
from stages.models import lora
from stages.models.files import config_check, decoder_names, naming, weights

CONFIG, TENSORS = 'adapter_config.json', 'adapter_model.safetensors'
PREFIX = 'base_model.model.'
DEFAULT_ALPHA = 8  # PEFT's own, where a configuration has none.
SETTINGS = {
  'r': config_check.size(2**16),
  'lora_alpha': config_check.POSITIVE,
  'use_rslora': config_check.FLAG,
  'base_model_name_or_path': config_check.TEXT,
}
# Settings of PEFT that would change the model, and the values that do not.
REFUSED = {
  'peft_type': ('LORA',),
  'bias': ('none',),
  'fan_in_fan_out': (False,),
  'use_dora': (False,),
  'lora_bias': (False,),
  'modules_to_save': (None, []),
  'rank_pattern': (None, {}),
  'alpha_pattern': (None, {}),
  'layer_replication': (None, []),
  'target_parameters': (None, []),
  # Others, such as PiSSA, take a part of the weights out of the model at load.
  'init_lora_weights': (True, False, 'gaussian', 'orthogonal', 'eva'),
}
# Settings of PEFT that do not change the model, or whose effect the tensors
# show. Any other one must be off.
HARMLESS = frozenset(
  """
  auto_mapping base_model_name_or_path corda_config ensure_weight_tying
  eva_config exclude_modules inference_mode layers_pattern layers_to_transform
  loftq_config lora_alpha lora_dropout lora_ga_config megatron_config
  megatron_core peft_version qalora_group_size r revision runtime_config
  target_modules task_type use_rslora
  """.split()
)


def is_adapter(folder: str | pathlib.Path) -> bool:
  """Whether a folder holds an adapter."""
  return (pathlib.Path(folder) / CONFIG).is_file()


def check_folder(folder: str | pathlib.Path):
  """Refuses a folder that holds no adapter.

  Raises:
    CheckpointError: for such a folder.
  """
  if not is_adapter(folder):
    path = pathlib.Path(folder) / CONFIG
    raise weights.CheckpointError(
      f'There is no adapter at {folder}: {path} was not found. Give the folder '
      'of an adapter in the format of PEFT.'
    )


def _tensors(parameter: str, prefix: str = '') -> dict[str, naming.Tensor]:
  """PEFT's tensors of A and B of a matrix, by our names."""
  name = decoder_names.NAMES[parameter].name.removesuffix('.weight')
  stem = f'{PREFIX}{prefix}{name}'
  a, b = lora.pair_names(parameter)
  ins = len(lora.split(parameter)[0])
  return {
    a: naming.Tensor(f'{stem}.lora_A.weight', ins),
    b: naming.Tensor(f'{stem}.lora_B.weight', 1),
  }


def write(
  folder: str | pathlib.Path,
  params,
  base_model: str | pathlib.Path,
  *,
  prefix: str = '',
  start: str | None = None,
):
  """Writes the adapter of an adapted policy, for PEFT to load.

  Args:
    folder: where to write; created if it does not exist.
    params: parameters of the policy, see `lora`.
    base_model: folder of the model that is adapted.
    prefix: of names of tensors, where the model is a part of another one.
    start: folder of the adapter that it started from, whose configuration and
      other tensors go with it; None for a new one.
  """
  from safetensors import numpy as st

  folder, alpha = pathlib.Path(folder), float(params[base.FROZEN][lora.ALPHA])
  folder.mkdir(parents=True, exist_ok=True)
  adapter = jax.tree.map(
    lambda x: np.asarray(jax.device_get(x), np.float32), params[lora.ADAPTER]
  )
  found = [p for p, *_ in lora.pairs(params)]
  config = {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': str(base_model),
    'r': adapter['layers'][lora.pair_names(found[0])[0]].shape[-1],
    'lora_alpha': int(alpha) if alpha.is_integer() else alpha,
    'target_modules': [lora.module_name(p).split('.')[-1] for p in found],
    'lora_dropout': 0.0,
    'bias': 'none',
    'fan_in_fan_out': False,
    'inference_mode': True,
  }
  text, tensors = json.dumps(config, indent=2), {}
  if start is not None:
    text = (pathlib.Path(start) / CONFIG).read_text()
    tensors = read_others(start, prefix)[1]
  names = {}
  for parameter in found:
    names |= _tensors(parameter, prefix)
  for name, x in weights.checkpoint_tensors(adapter, names):
    tensors[name] = np.ascontiguousarray(x)
  st.save_file(tensors, folder / TENSORS, metadata={'format': 'pt'})
  (folder / CONFIG).write_text(text)


def read_others(
  folder: str | pathlib.Path, prefix: str
) -> tuple[float, dict[str, np.ndarray]]:
  """α/r of an adapter, and its tensors outside layers of a part of the model.

  Args:
    folder: of the adapter.
    prefix: of names of the part's tensors.

  Raises:
    CheckpointError: if it is unreadable.
  """
  from safetensors import numpy as st

  folder = pathlib.Path(folder)
  config = _read_config(folder)
  stored, _ = _stored(folder)
  tensors = st.load_file(folder / TENSORS)
  others = {x: tensors[x] for x in stored if not _is_in(x, prefix)}
  return _alpha(config) / config['r'], others


def _is_in(name: str, prefix: str) -> bool:
  """Whether a tensor is of layers of a part of the model, or of a whole one."""
  return not prefix or name.startswith(f'{PREFIX}{prefix}model.layers.')


def _alpha(config: dict[str, Any]) -> float:
  """α of a configuration; with rsLoRA, α √r, as α/√r is the scale there."""
  alpha = float(config.get('lora_alpha') or DEFAULT_ALPHA)
  return alpha * math.sqrt(config['r']) if config.get('use_rslora') else alpha


def _stored(
  folder: pathlib.Path,
) -> tuple[dict[str, tuple[int, ...]], set[str]]:
  """Shapes of the tensors of an adapter, by their names, and their types."""
  import safetensors

  stored, kinds = {}, set()
  try:
    if not (folder / TENSORS).is_file():  # A pipe would be waited for.
      raise OSError('it is not there')
    with safetensors.safe_open(folder / TENSORS, framework='numpy') as file:
      for name in file.keys():
        stored[name] = tuple(file.get_slice(name).get_shape())
        kinds.add(file.get_slice(name).get_dtype())
  except (OSError, safetensors.SafetensorError) as error:
    raise weights.CheckpointError(
      f'{folder / TENSORS} cannot be read ({error}): copy the adapter again.'
    ) from error
  return stored, kinds


def load(
  settings: lora.Lora, shapes: Any, *, prefix: str = ''
) -> tuple[lora.Lora, Callable[[Any], dict[str, Any]]]:
  """Reads an adapter for the model that it is to adapt.

  Args:
    settings: names the adapter; what else they set must be as in it.
    shapes: shapes of the parameters of the model.
    prefix: of names of tensors, where the model is a part of another one, whose
      other adapters are then left to `read_others`.

  Returns:
    The settings of the adapter, and `params -> adapter`, which reads it.

  Raises:
    CheckpointError: if it is unreadable, or was made for another model; names
      all that does not fit.
  """
  folder = pathlib.Path(settings.adapter)
  config = _read_config(folder)
  stored, kinds = _stored(folder)
  stored = {name: x for name, x in stored.items() if _is_in(name, prefix)}
  rank, alpha = config['r'], _alpha(config)
  targets = tuple(
    p for p in lora.LETTERS.values() if any(_module(p) in k for k in stored)
  )
  faults = _other_settings(settings, rank, alpha, targets)
  faults += _mismatches(stored, shapes, targets, rank, prefix)
  faults += [] if targets else ['it adapts no layer of the language model']
  faults += [f'it has tensors of {x}' for x in kinds - {*weights.FLOATS}]
  if faults:
    raise weights.CheckpointError(
      f'The adapter {folder} (of {config.get("base_model_name_or_path")}) does '
      f'not fit: {"; ".join(faults)}. Give it the model that it was made for.'
    )
  names = tuple(_module(p).split('.')[-2] for p in targets)
  found = dataclasses.replace(settings, rank=rank, alpha=alpha, targets=names)

  def read(params):
    from safetensors import numpy as st

    tensors, adapter = st.load_file(folder / TENSORS), {}
    for name, x in lora.shapes(params, found).items():
      pattern = names_of[name].name
      layers = [tensors[pattern.format(i=i)].T for i in range(x.shape[0])]
      weights.check_finite(f'{pattern} of {folder}', *layers)
      adapter[name] = jnp.asarray(np.stack(layers), x.dtype).reshape(x.shape)
    return {'layers': adapter}

  names_of = {}
  for p in targets:
    names_of |= _tensors(p, prefix)
  return found, read


def _module(parameter: str) -> str:
  """A part of the names of a matrix's tensors: '.self_attn.q_proj.'."""
  return f'.{lora.module_name(parameter)}.'


def _read_config(folder: pathlib.Path) -> dict[str, Any]:
  """The configuration of an adapter that is supported."""
  check_folder(folder)
  path = folder / CONFIG
  config = weights.read_json(path)
  faults = ['it is not an object']
  if isinstance(config, dict):
    faults = [*config_check.wrong(config, SETTINGS)]
    faults += [] if config.get('r') else ['r is missing']
  if faults:
    raise weights.CheckpointError(
      f'{path} is not the configuration of a LoRA adapter: '
      f'{"; ".join(faults)}. Copy it again.'
    )
  wrong = [
    f'{key} {config[key]!r:.80}'
    for key, allowed in REFUSED.items()
    if config.get(key, allowed[0]) not in allowed
  ]
  wrong += [
    f'{key} {value!r:.80}'
    for key, value in config.items()
    if value and key not in HARMLESS and key not in REFUSED
  ]
  if wrong:
    raise weights.CheckpointError(
      f'{path} sets {" and ".join(wrong)}, which is not supported.'
    )
  return config


def _other_settings(settings, rank, alpha, targets) -> list[str]:
  """Differences between given settings and those of an adapter."""
  faults = []
  if settings.rank and settings.rank != rank:
    faults.append(f'its rank is {rank}, and {settings.rank} is asked for')
  if settings.alpha is not None and not math.isclose(settings.alpha, alpha):
    faults.append(
      f'its alpha is {alpha:g}, and {settings.alpha:g} is asked for'
    )
  if settings.targets is not None:
    wanted = lora.parameters(settings.targets)
    if wanted != targets:
      its, others = (
        ', '.join(_module(p).split('.')[-2] for p in some)
        for some in (targets, wanted)
      )
      faults.append(f'its targets are {its}, and {others} are asked for')
  return faults


def _mismatches(stored, shapes, targets, rank: int, prefix: str) -> list[str]:
  """Differences between an adapter's tensors and those that a model needs."""
  needed, layers = {}, shapes['layers']
  for p in targets:
    ins, _ = lora.split(p)
    if p not in layers:
      continue
    L, *shape = layers[p].shape
    sizes = math.prod(shape[: len(ins)]), math.prod(shape[len(ins) :])
    pair = (rank, sizes[0]), (sizes[1], rank)
    for tensor, size in zip(_tensors(p, prefix).values(), pair, strict=True):
      needed |= {tensor.name.format(i=i): size for i in range(L)}
  found = {}
  for name in sorted(stored.keys() | needed.keys(), key=_layer_last):
    got, want = stored.get(name), needed.get(name)
    if got != want:
      kind = re.sub(r'layers\.\d+\.', '', name.removeprefix(PREFIX))
      kind = kind.removeprefix('model.').removesuffix('.weight')
      found.setdefault((kind, got, want), []).append(_layer_last(name)[1])
  return [
    _fault(kind, got, want, [i for i in at if i >= 0])
    for (kind, got, want), at in found.items()
  ]


def _layer_last(name: str) -> tuple[str, int]:
  """A name without its layer, and the layer; −1 without one."""
  layer = re.search(r'layers\.(\d+)\.', name)
  return re.sub(r'layers\.\d+', '', name), int(layer[1]) if layer else -1


def _fault(kind: str, got, want, layers: list[int]) -> str:
  """A mismatch of one kind of tensor, in some layers."""
  at = ''
  if layers:
    first, last = layers[0], layers[-1]
    at = f' of layer {first}' if first == last else f' of layers {first}–{last}'
  if want is None:
    return f'{kind}{at} is not adapted in this model'
  if got is None:
    return f'{kind}{at} is missing'
  return f'{kind}{at} is {list(got)}, expected {list(want)}'
