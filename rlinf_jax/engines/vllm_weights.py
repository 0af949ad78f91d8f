"""Transfer of parameters to vLLM within one process."""

import dataclasses
import functools

import jax
import numpy as np
import torch
from vllm.distributed.weight_transfer import base, factory
from vllm.model_executor.model_loader import reload

NAME = 'rlinf_jax'


@dataclasses.dataclass
class InitInfo(base.WeightTransferInitInfo):
  """Arguments of the initialization: none."""


@dataclasses.dataclass
class UpdateInfo(base.WeightTransferUpdateInfo):
  """Parameters, by their names in a checkpoint."""

  tensors: dict[str, torch.Tensor]


class InProcess(base.WeightTransferEngine[InitInfo, UpdateInfo]):
  """Copies tensors into the model, which packs them in its own layout."""

  init_info_cls, update_info_cls = InitInfo, UpdateInfo

  def init_transfer_engine(self, init_info):
    del init_info

  def start_weight_update(self):
    reload.initialize_layerwise_reload(self.model)

  def receive_weights(self, update_info):
    tensors = update_info.tensors
    if not hasattr(self.model, 'lm_head'):  # Gemma 2 uses the embedding.
      tensors = {
        name: x for name, x in tensors.items() if 'lm_head' not in name
      }
    self.model.load_weights(tensors.items())

  def finish_weight_update(self):
    reload.finalize_layerwise_reload(self.model, self.model_config)

  def shutdown(self):
    pass


def tensor(x: jax.Array) -> torch.Tensor:
  """An array as a tensor, without a copy if it is on one device."""
  if len(x.devices()) == 1:
    return torch.from_dlpack(jax.block_until_ready(x))
  return torch.from_numpy(np.array(x))


def sync_omp_threads():
  """Sets OpenMP's number of threads in the calling thread to that of torch.

  OpenMP keeps one number for each calling thread, and vLLM's attention on a CPU
  fails if it differs from torch's.
  """
  torch.set_num_threads(torch.get_num_threads())


def tolerate_broken_modules():
  """Makes vLLM skip module attributes that raise when they are inspected.

  On a CPU, vLLM inspects `__dict__` of everything in every loaded module as it
  starts. Some modules raise, such as the placeholders that trimesh (a
  dependency of simulators) has for packages that are not installed.
  """
  try:
    from vllm.triton_utils import dispatcher
  except ImportError:
    return

  def safe_hasattr(x, name):
    try:
      return hasattr(x, name)
    except Exception:  # noqa: BLE001 (foreign modules may raise anything)
      return False

  dispatcher.hasattr = safe_hasattr  # Shadows the builtin in that module only.


@functools.cache
def register():
  """Registers `InProcess` with vLLM under `NAME`."""
  factory.WeightTransferEngineFactory.register_engine(NAME, InProcess)
