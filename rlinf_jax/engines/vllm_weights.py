"""How vLLM takes over parameters that lie in its own process."""

import dataclasses
import functools

import jax
import numpy as np
import torch
from vllm.distributed.weight_transfer import base, factory
from vllm.model_executor.model_loader import reload

NAME = 'rlinf_jax'


@dataclasses.dataclass
class Nothing(base.WeightTransferInitInfo):
  """What has to be agreed on beforehand."""


@dataclasses.dataclass
class Tensors(base.WeightTransferUpdateInfo):
  """Parameters, by their names in a checkpoint."""

  tensors: dict[str, torch.Tensor]


class InProcess(base.WeightTransferEngine[Nothing, Tensors]):
  """Copies tensors into the model, which packs them as it likes them best."""

  init_info_cls, update_info_cls = Nothing, Tensors

  def init_transfer_engine(self, init_info):
    del init_info

  def start_weight_update(self):
    reload.initialize_layerwise_reload(self.model)

  def receive_weights(self, update_info):
    self.model.load_weights(update_info.tensors.items())

  def finish_weight_update(self):
    reload.finalize_layerwise_reload(self.model, self.model_config)

  def shutdown(self):
    pass


def tensor(x: jax.Array) -> torch.Tensor:
  """An array as a tensor: the same memory, where one device has it."""
  if len(x.devices()) == 1:
    return torch.from_dlpack(jax.block_until_ready(x))
  return torch.from_numpy(np.array(x))


def agree_on_threads():
  """Has OpenMP use as many in the calling thread as torch does everywhere.

  It counts them by caller, and attention on a CPU fails if the two differ.
  """
  torch.set_num_threads(torch.get_num_threads())


def look_calmly():
  """Has vLLM pass over what cannot be looked at.

  As it starts on a CPU it asks everything in every module for a `__dict__`.
  Some raise, such as what trimesh, and so a simulator, has in the place of a
  package that is not there.
  """
  try:
    from vllm.triton_utils import dispatcher
  except ImportError:
    return

  def has(x, name):
    try:
      return hasattr(x, name)
    except Exception:  # noqa: BLE001 (what it raises is that module's affair)
      return False

  dispatcher.hasattr = has  # Before the one of `builtins`, in there alone.


@functools.cache
def register():
  """Makes it known to vLLM, by `NAME`."""
  factory.WeightTransferEngineFactory.register_engine(NAME, InProcess)
