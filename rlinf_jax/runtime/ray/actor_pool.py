"""The actors of a plan: started, asked, found dead and started again."""

import collections
from collections.abc import Callable, Mapping, Sequence
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

from planner.ir import plan as plan_lib
from rlinf_jax.runtime import programs
from rlinf_jax.runtime.base import ProcessDiedError, StageError
from rlinf_jax.runtime.ray import actor as actor_lib

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


def connect(address: str = HERE):
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


class ActorPool:
  """A plan's actors, one for each process of a place.

  A process is named as its place is, or 'learner 1/2' where there are several.

  Attributes:
    members: all processes of the plan, by name.
    actors: by process, as far as they are there.
    about: where each is.
  """

  def __init__(
    self,
    plan: plan_lib.Plan,
    flows: actor_lib.Flows,
    lowered: Mapping[str, programs.Lowered],
    receive_timeout: float | None,
  ):
    """Starts nothing yet."""
    self._plan, self._flows, self._receive_timeout = (
      plan,
      flows,
      receive_timeout,
    )
    self._agreed = actor_lib.fingerprint(lowered)
    self._group, self._needs = None, {}
    self._bundles: list[tuple[str, ...]] = []  # Places, of each of Ray's.
    self._shared = ''  # A folder.
    if plan.shared_devices:
      self._shared = tempfile.mkdtemp(prefix='rlinf_jax-')
      weakref.finalize(self, shutil.rmtree, self._shared, ignore_errors=True)
    self.actors, self.about = {}, {}
    every = (
      actor_lib.Process(name, rank, place.processes)
      for name, place in plan.places.items()
      for rank in range(place.processes)
    )
    self._disbanded: set[str] = set()
    self.members = {str(member): member for member in every}
    _refuse_outside(plan, lowered)

  def ready(self) -> list[str]:
    """Starts the actors that are not there; returns which.

    Raises:
      ValueError: if there are too few devices for the plan, or an actor has
        recorded another step.
    """
    missing = [name for name in self.members if name not in self.actors]
    if missing:
      self._start(missing)
      self.ask(self._meeting())
    return missing

  def again(self, name: str):
    """Starts a process that has died again, of which others do not know yet."""
    ray.kill(self.actors.pop(name))
    self._start([name])
    self.ask(self._meeting(), {name: self.actors[name]})
    return self.actors[name]

  def _start(self, missing: Sequence[str]):
    """Starts some processes, which make themselves ready."""
    self._reserve()
    for name in missing:
      self.actors[name] = self._started(name)
    text, where = self._plan.to_json(), os.getcwd()
    made = {name: self.actors[name] for name in missing}
    self._join(made)
    self.ask(
      lambda name, actor: actor.prepare.remote(
        *(self.members[name], text, self._flows, self._agreed, where),
        *(self._receive_timeout, self._shared),
      ),
      made,
    )
    self.about |= self.ask(lambda _, actor: actor.about.remote(), made)

  def _meeting(self):
    """How processes come to know the others."""
    peers = {
      place: [self.actors[name] for name in self._of(place)]
      for place in self._plan.places
    }
    return lambda name, actor: actor.meet.remote(
      peers, self.near(self.members[name].place)
    )

  def _of(self, place: str) -> list[str]:
    """The processes of a place."""
    return [name for name, one in self.members.items() if one.place == place]

  def _spanning(self) -> list[str]:
    """The processes of places that have several."""
    return [name for name, member in self.members.items() if member.of > 1]

  def _join(self, made):
    """Makes the devices of each place's processes one list."""
    many = {name: made[name] for name in self._spanning() if name in made}
    first = {name: x for name, x in many.items() if not self.members[name].rank}
    told = self.ask(lambda _, actor: actor.address.remote(), first)
    at = {self.members[name].place: address for name, address in told.items()}

    def join(name, actor):
      member = self.members[name]
      return actor.join.remote(at[member.place], member)

    self.ask(join, many)

  def near(self, place: str) -> set[str]:
    """The places whose values go through memory of a place's machine.

    Those that are processors of the same one, and those that share devices.
    """
    here = self.about[self._of(place)[0]]
    shared = self._plan.lease_devices(place)

    def is_near(name):
      there = self.about[name]
      return (
        here['platform'] == there['platform'] == 'cpu'
        and here['node'] == there['node']
      )

    return {
      other
      for other in self._plan.places
      if all(map(is_near, self._of(other)))
      or shared
      or self._plan.lease_devices(other)
    }

  def _reserve(self):
    """Reserves devices for all places together."""
    if self._group:
      return
    connect()
    there = ray.cluster_resources()
    kind = next(kind for kind in KINDS if there.get(kind))
    beside = collections.defaultdict(list)
    for name, member in self.members.items():
      beside[self._plan.lease_devices(member.place) or name].append(name)
    self._bundles = [tuple(names) for names in beside.values()]
    bundles = []
    for names in self._bundles:
      members = [self.members[name] for name in names]
      needs = [_need(self._plan, one, members, kind) for one in members]
      total = sum(map(collections.Counter, needs), collections.Counter())
      bundles.append({what: round(n, 4) for what, n in total.items()})
      self._needs |= zip(names, needs, strict=True)
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
    place = self._plan.places[self.members[name].place]
    environment = _environment(place, need)
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
    """What actors answer, by process.

    Args:
      call: `process, actor -> reference`.
      actors: all, if not given.

    Raises:
      ProcessDiedError: if one is no more.
      StageError: if it fails otherwise.
    """
    actors = self.actors if actors is None else actors
    asked = {call(name, actor): name for name, actor in actors.items()}
    answers, left = {}, list(asked)
    while left:  # As they come: one may wait for another that is no more.
      (one,), left = ray.wait(left)
      try:
        answers[asked[one]] = ray.get(one)
      except ray.exceptions.RayError as error:
        raise told(error, asked[one]) from None
    return {name: answers[name] for name in asked.values()}

  def dead(self) -> dict[str, ProcessDiedError]:
    """The processes that are no more."""
    asked = {actor.about.remote(): name for name, actor in self.actors.items()}
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ALIVE)
    found = {}
    for one in done:
      try:
        ray.get(one)
      except ray.exceptions.RayActorError as error:
        found[asked[one]] = told(error, asked[one])
    return found

  def disband(self):
    """Ends the processes that wait for each other.

    Where one of them stops, others of its place are in a call of all, for ever.
    """
    for name in self._spanning():
      if name in self.actors:
        ray.kill(self.actors[name])
        self._disbanded.add(name)

  def bury(self):
    """Forgets places of which a process is no more: they are started again."""
    if not self.actors:
      return
    gone = self.dead().keys() | self._disbanded
    for place in {self.members[name].place for name in gone}:
      for name in self._of(place):
        ray.kill(self.actors.pop(name))
    self._disbanded.clear()

  def end(self):
    """Ends all."""
    for actor in self.actors.values():
      ray.kill(actor)
    self.actors = {}
    if self._group:
      util.remove_placement_group(self._group)
      self._group = None


def _refuse_outside(plan, lowered):
  """Refuses stages outside of JAX on places that have several processes.

  Each would run them, and they need not do the same in each.

  Raises:
    ValueError: if there is one.
  """
  for some in lowered.values():
    for name, program in some.programs.items():
      many = plan.places[name].processes
      for _, flow, op, _ in programs.stage_calls(some.flow, program):
        node = flow.nodes[op.node]
        if many > 1 and node.stage.host:
          raise ValueError(
            f'Stage {node.name} does not run in JAX, and place {name!r} is of '
            f'{many} processes, which run JAX together: plan it on a place of '
            'one process.'
          )


def told(error, place: str = '') -> BaseException:
  """What happened in an actor, in words."""
  if isinstance(error, ray.exceptions.RayTaskError):
    cause = error.cause
    if isinstance(cause, StageError | ValueError):
      return type(cause)(str(cause))
    return StageError(f'Place {place!r} failed: {cause}')
  if isinstance(error, ray.exceptions.RayActorError):
    why = str(error).strip().splitlines()[-1]
    return ProcessDiedError(f'The process of place {place!r} has died: {why}')
  return StageError(str(error))


def _need(
  plan,
  member: actor_lib.Process,
  beside: Sequence[actor_lib.Process],
  kind: str,
) -> dict[str, float]:
  """What Ray must give a process.

  Args:
    plan: that it is of.
    member: the process.
    beside: processes that share its devices, itself included.
    kind: of device.

  Raises:
    ValueError: for devices that Ray cannot give to several processes.
  """
  n = float(len(plan.places[member.place].devices) // member.of)
  if len(beside) > 1 and kind != 'CPU':
    shared = len(plan.lease_devices(member.place))
    if kind != 'GPU' or shared > 1:
      raise ValueError(
        f'The places {[one.place for one in beside]} share {shared} {kind}: '
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
      'JAX_NUM_CPU_DEVICES': str(len(place.devices) // place.processes),
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
