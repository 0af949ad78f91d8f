"""The actors of a plan: started, asked, found dead and started again."""

import collections
from collections.abc import Callable, Mapping
import os
import shutil
import sys
import tempfile
from typing import Any
import weakref

import jax
import ray
from ray import util
from ray.util import scheduling_strategies as scheduling

from planner import plan as plan_lib
from rlinf_jax.runtime import actor as actor_lib
from rlinf_jax.runtime import host
from rlinf_jax.runtime.worker import DiedError, StageError

HERE = 'local'  # In place of an address: Ray is started on this machine.
ALIVE = 2.0  # Seconds in which a process that lives answers.
READY = 120.0  # Seconds until actors have their resources.
KINDS = ('TPU', 'GPU', 'CPU')  # Of what Ray counts, the first that is there.
# Settings of JAX that another process must share to compute the same bits.
SETTINGS = (
  'jax_enable_x64',
  'jax_default_matmul_precision',
  'jax_numpy_rank_promotion',
  'jax_compilation_cache_dir',
  'jax_platforms',
  'jax_threefry_partitionable',
)


def start(address: str = HERE):
  """Connects to Ray, or starts it on this machine.

  Args:
    address: 'local', 'auto', or that of a cluster, such as 'ray://head:10001'.

  Raises:
    ConnectionError: if there is none.
  """
  if ray.is_initialized():
    return
  given = {'log_to_driver': False, 'logging_level': 'error'}
  if address == HERE:
    ray.init('local', num_cpus=_cpus(), **given)
    return
  try:
    ray.init(address, **given)
  except ConnectionError as error:
    raise ConnectionError(
      f'There is no Ray cluster at {address!r}: start one with `ray start '
      "--head`, or say 'local' to have one on this machine."
    ) from error


def _cpus() -> int:
  """Actors wait for each other more than they compute: none is refused."""
  return max(64, len(os.sched_getaffinity(0)))


class Crew:
  """A plan's actors, one a place.

  Attributes:
    actors: by place, as far as they are there.
    about: where each is.
  """

  def __init__(
    self,
    plan: plan_lib.Plan,
    flows: actor_lib.Flows,
    lowered: Mapping[str, host.Lowered],
    patience: float | None,
  ):
    """Starts nothing yet."""
    self._plan, self._flows, self._patience = plan, flows, patience
    self._agreed = actor_lib.fingerprint(lowered)
    self._group, self._needs = None, {}
    self._bundles: list[tuple[str, ...]] = []  # Places, of each of Ray's.
    self._shared = ''  # A folder.
    if plan.share:
      self._shared = tempfile.mkdtemp(prefix='rlinf_jax-')
      weakref.finalize(self, shutil.rmtree, self._shared, ignore_errors=True)
    self.actors, self.about = {}, {}

  def ready(self) -> list[str]:
    """Starts the actors that are not there; returns their places.

    Raises:
      ValueError: if there are too few devices for the plan, or an actor has
        recorded another step.
    """
    missing = [name for name in self._plan.places if name not in self.actors]
    if not missing:
      return []
    self._reserve()
    for name in missing:
      self.actors[name] = self._started(name)
    text, where = self._plan.to_json(), os.getcwd()
    made = {name: self.actors[name] for name in missing}
    self.ask(
      lambda name, actor: actor.prepare.remote(
        *(name, text, self._flows, self._agreed, where, self._patience),
        self._shared,
      ),
      made,
    )
    self.about |= self.ask(lambda _, actor: actor.about.remote(), made)
    self.ask(
      lambda name, actor: actor.meet.remote(self.actors, self.near(name))
    )
    return missing

  def near(self, place: str) -> set[str]:
    """The places whose values go through memory of the machine.

    Those that are processors of the same one, and those that share devices.
    """
    here = self.about[place]
    return {
      name
      for name, there in self.about.items()
      if (
        here['platform'] == there['platform'] == 'cpu'
        and here['node'] == there['node']
      )
      or self._plan.shared(place)
      or self._plan.shared(name)
    }

  def _reserve(self):
    """Reserves devices for all places together."""
    if self._group:
      return
    start()
    there = ray.cluster_resources()
    kind = next(kind for kind in KINDS if there.get(kind))
    beside = collections.defaultdict(list)
    for name in self._plan.places:
      beside[self._plan.shared(name) or name].append(name)
    self._bundles = [tuple(names) for names in beside.values()]
    bundles = []
    for names in self._bundles:
      needs = {name: _need(self._plan, name, names, kind) for name in names}
      total = sum(
        map(collections.Counter, needs.values()), collections.Counter()
      )
      bundles.append({what: round(n, 4) for what, n in total.items()})
      self._needs |= needs
    group = util.placement_group(bundles, strategy='PACK')
    if not group.wait(READY):
      util.remove_placement_group(group)
      raise ValueError(
        f'The plan wants {_listed(self._plan, kind)}, and Ray has '
        f'{there.get(kind, 0):g} {kind} in all: add nodes, or bind a plan for '
        'fewer.'
      )
    self._group = group

  def _started(self, name: str):
    made = ray.remote(concurrency_groups=actor_lib.GROUPS)(actor_lib.Actor)
    need = self._needs[name]
    environment = _environment(self._plan.places[name], need)
    return made.options(
      name=f'{name} ({os.getpid()}-{os.urandom(3).hex()})',
      num_cpus=need['CPU'],
      num_gpus=need.get('GPU', 0),
      resources={'TPU': need['TPU']} if 'TPU' in need else None,
      scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(
        self._group,
        placement_group_bundle_index=next(
          i for i, names in enumerate(self._bundles) if name in names
        ),
      ),
      runtime_env={'env_vars': environment},
    ).remote()

  def ask(
    self,
    call: Callable[[str, Any], Any],
    actors: Mapping[str, Any] | None = None,
  ) -> dict[str, Any]:
    """What actors answer, by place.

    Args:
      call: `place, actor -> reference`.
      actors: all, if not given.

    Raises:
      DiedError: if one is no more.
      StageError: if it fails otherwise.
    """
    actors = self.actors if actors is None else actors
    asked = {name: call(name, actor) for name, actor in actors.items()}
    answers = {}
    for name, one in asked.items():
      try:
        answers[name] = ray.get(one)
      except ray.exceptions.RayError as error:
        raise told(error, name) from None
    return answers

  def dead(self) -> dict[str, DiedError]:
    """The places whose process is no more."""
    asked = {actor.about.remote(): name for name, actor in self.actors.items()}
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ALIVE)
    found = {}
    for one in done:
      try:
        ray.get(one)
      except ray.exceptions.RayActorError as error:
        found[asked[one]] = told(error, asked[one])
    return found

  def bury(self):
    """Forgets the dead, so that they are started again."""
    if not self.actors:
      return
    for name in self.dead():
      ray.kill(self.actors.pop(name))

  def end(self):
    """Ends all."""
    for actor in self.actors.values():
      ray.kill(actor)
    self.actors = {}
    if self._group:
      util.remove_placement_group(self._group)
      self._group = None


def told(error, place: str = '') -> BaseException:
  """What happened in an actor, in words."""
  if isinstance(error, ray.exceptions.RayTaskError):
    cause = error.cause
    if isinstance(cause, StageError | ValueError):
      return type(cause)(str(cause))
    return StageError(f'Place {place!r} failed: {cause}')
  if isinstance(error, ray.exceptions.RayActorError):
    why = str(error).strip().splitlines()[-1]
    return DiedError(f'The process of place {place!r} has died: {why}')
  return StageError(str(error))


def _need(plan, name: str, beside: tuple[str, ...], kind: str):
  """What Ray must give a place.

  Args:
    plan: that it is of.
    name: of the place.
    beside: places that share its devices, itself included.
    kind: of device.

  Raises:
    ValueError: for devices that Ray cannot give to several processes.
  """
  n = float(len(plan.places[name].devices))
  if len(beside) > 1 and kind != 'CPU':
    if kind != 'GPU' or len(plan.shared(name)) > 1:
      raise ValueError(
        f'The places {list(beside)} share {len(plan.shared(name))} {kind}: '
        'processes can share processors, or a single GPU. Place their stages '
        'together, or run them in one process.'
      )
    n = 1 / len(beside)
  return {'CPU': 1.0} | {kind: n}


def _environment(place, need) -> dict[str, str]:
  """What an actor's JAX must begin with."""
  there = {
    name.upper(): str(value)
    for name in SETTINGS
    if (value := getattr(jax.config, name, None)) is not None
  }
  if need.keys() == {'CPU'}:
    there |= {
      'JAX_PLATFORMS': 'cpu',
      'JAX_NUM_CPU_DEVICES': str(len(place.devices)),
    }
  else:
    there.pop('JAX_PLATFORMS', None)
    if need.get('GPU', 1) < 1:  # Memory is another's as soon as it is free.
      there['XLA_PYTHON_CLIENT_ALLOCATOR'] = 'platform'
  # What the driver imports from folders, such as experiments of a checkout.
  own = [path for path in sys.path if not path.startswith(sys.prefix)]
  there['PYTHONPATH'] = os.pathsep.join(map(os.path.abspath, own))
  if 'XLA_FLAGS' in os.environ:
    there['XLA_FLAGS'] = os.environ['XLA_FLAGS']
  return there


def _listed(plan, kind: str) -> str:
  """Devices of every place, for people."""
  return ', '.join(
    f'{len(place.devices)} {kind} for {name!r}'
    for name, place in plan.places.items()
  )
