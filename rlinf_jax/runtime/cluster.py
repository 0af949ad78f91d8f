"""Runs the programs of a plan in Ray actors: a process a place.

The driver begins steps and reads what they report. In between it has no part:
every actor works through its own program, and values go from actor to actor.
"""

from collections.abc import Mapping
from concurrent import futures
import contextlib
import os
import sys
import time
from typing import Any

import jax
import ray
from ray import util
from ray.util import scheduling_strategies as scheduling

from planner import graph as graph_lib
from planner import plan as plan_lib
from rlinf_jax.runtime import actor as actor_lib
from rlinf_jax.runtime import host, link, local, parcel
from rlinf_jax.runtime import timeline as timeline_lib
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
    ray.init('local', include_dashboard=None, num_cpus=_cpus(), **given)
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


class Cluster:
  """A plan's places in actors, which hold the state that steps carry.

  It is used as `local.Local` is.

  Attributes:
    plan: what runs.
    lowered: flows by name.
    timeline: what ran when, on the driver's clock.
    steps: updates begun.
  """

  def __init__(
    self,
    plan: plan_lib.Plan,
    flows: actor_lib.Flows,
    *,
    step: graph_lib.Flow,
    evaluate: graph_lib.Flow | None = None,
    patience: float | None = None,
  ):
    """Refuses what the plan cannot run; starts nothing.

    Args:
      plan: how to run them.
      flows: records the flows anew, in any process; Ray must be able to carry
        it there.
      step: the flow of a step.
      evaluate: the flow of its evaluation.
      patience: seconds that a place waits for a value of another.
    """
    self.plan, self._flows, self._patience = plan, flows, patience
    self.lowered = host.lower(plan, step, evaluate)
    self.timeline = timeline_lib.Timeline()
    self._epoch = time.time() - self.timeline.now()[0]
    self.steps, self._failure, self._tree = 0, None, None
    self._actors, self._about, self._group, self._wanted = {}, {}, None, []
    self._flying: list[futures.Future] = []
    self._life = 0  # How often a state was loaded.
    self._pool = futures.ThreadPoolExecutor(64)

  # Actors.

  def _begun(self) -> dict[str, Any]:
    """The actors; they are started when they are first needed."""
    if self._actors:
      return self._actors
    start()
    kind = next(k for k in KINDS if ray.cluster_resources().get(k))
    needs = [
      {kind: float(len(place.devices))} for place in self.plan.places.values()
    ]
    if kind != 'CPU':
      needs = [need | {'CPU': 1.0} for need in needs]
    self._group = util.placement_group(needs, strategy='PACK')
    if not self._group.wait(READY):
      raise ValueError(
        f'The plan wants {_listed(self.plan, kind)}, and Ray has '
        f'{ray.cluster_resources().get(kind, 0):g} {kind} in all: add nodes, '
        'or bind a plan for fewer.'
      )
    made = ray.remote(concurrency_groups=actor_lib.GROUPS)(actor_lib.Actor)
    for i, (name, need) in enumerate(zip(self.plan.places, needs, strict=True)):
      self._actors[name] = made.options(
        name=f'{name} ({os.getpid()}-{id(self):x})',
        num_cpus=need['CPU'],
        num_gpus=need.get('GPU', 0),
        resources={'TPU': need['TPU']} if 'TPU' in need else None,
        scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(
          self._group, placement_group_bundle_index=i
        ),
        runtime_env={'env_vars': _environment(self.plan.places[name], kind)},
      ).remote()
    agreed = actor_lib.fingerprint(self.lowered)
    self._all(
      lambda name, actor: actor.prepare.remote(
        *(name, self.plan.to_json(), self._flows),
        *(agreed, os.getcwd(), self._patience),
      )
    )
    self._about = self._all(lambda _, actor: actor.about.remote())
    self._all(lambda _, actor: actor.meet.remote(self._actors))
    for wanted in self._wanted:
      self._all(lambda _, actor: actor.compile.remote(wanted))
    return self._actors

  def _all(self, ask) -> dict[str, Any]:
    """What every actor answers, by place."""
    asked = {name: ask(name, actor) for name, actor in self._actors.items()}
    answers = {}
    for name, one in asked.items():
      try:
        answers[name] = ray.get(one)
      except ray.exceptions.RayError as error:
        raise _told(error, name) from None
    return answers

  # As `local.Local`.

  def way(self, dtype, size: int) -> str:
    """How a value goes from place to place, in words."""
    return link.way(dtype, size)

  def ambient(self):
    """The driver reads checkpoints as they are; actors lay them out."""
    return contextlib.nullcontext()

  def compile(self, name: str):
    """Begins to make every stage of a flow ready; does not wait for it."""
    if name not in self._wanted:
      self._wanted.append(name)
      for actor in self._actors.values():
        actor.compile.remote(name)

  def load(self, state, steps: int = 0):
    """Hands `state` to the actors that hold it.

    A runtime in which something failed begins anew.

    Args:
      state: the workflow's, as arrays.
      steps: updates that led to it.
    """
    futures.wait(self._flying)
    if isinstance(self._failure, DiedError):
      self._end()
    actors = self._begun()
    self._failure, self._flying, self.steps = None, [], steps
    self._life += 1
    leaves, self._tree = jax.tree.flatten(state)
    resident = self.lowered['step'].resident
    packed = [ray.put(parcel.pack(x)) for x in leaves]
    asked = []
    for name, actor in actors.items():
      own = {i: packed[i] for i, some in enumerate(resident) if name in some}
      asked.append(actor.load.remote(self._life, list(own), *own.values()))
    ray.get(asked)

  def state(self):
    """The carried state, on the driver."""
    self.wait()
    found = {}
    for leaves in self._all(lambda _, actor: actor.state.remote()).values():
      found |= leaves
    leaves = [
      jax.numpy.asarray(parcel.unpack(x)) for _, x in sorted(found.items())
    ]
    return jax.tree.unflatten(self._tree, leaves)

  def submit(self, batch, key) -> futures.Future:
    """Begins a step; returns the future of what it reports."""
    return self._begin('step', batch, key)

  def step(self, batch, key):
    """One step of the workflow, to its end; returns what it reports."""
    return self._ended(self.submit(batch, key))

  def evaluate(self, batch, key):
    """Evaluates the state as it is; returns what it reports."""
    return self._ended(self._begin('evaluate', batch, key))

  def _ended(self, made):
    self.wait()
    return made.result()

  def wait(self):
    """Returns when every place has done all that it was asked to.

    Raises:
      StageError: if one of them failed.
    """
    futures.wait(self._flying)
    if self._failure:
      raise self._failure

  def close(self):
    """Ends the actors."""
    self._end()
    self._pool.shutdown(wait=False)

  def _end(self):
    for actor in self._actors.values():
      ray.kill(actor)
    self._actors = {}
    if self._group:
      util.remove_placement_group(self._group)
      self._group = None

  def about(self) -> dict[str, dict[str, Any]]:
    """Where every place is: process, node, kind of device."""
    self._begun()
    return dict(self._about)

  def moved(self) -> dict[tuple[str, str], tuple[int, float]]:
    """Bytes sent from place to place, and seconds that took, by the ends."""
    found = {}
    for some in self._all(lambda _, actor: actor.moved.remote()).values():
      found |= some
    return found

  def _begin(self, name, *inputs):
    if self._failure:
      raise self._failure
    actors = self._begun()
    self.steps += name == 'step'
    step = self.steps + (name != 'step')
    leaves = ray.put([parcel.pack(x) for x in jax.tree.leaves(inputs)])
    asked = {
      actor.turn.remote(name, step, leaves): place
      for place, actor in actors.items()
    }
    made = self._pool.submit(self._collect, asked)
    self._flying = [one for one in self._flying if not one.done()] + [made]
    return local.reported(self.lowered[name].flow, made)

  def _collect(self, asked: Mapping[Any, str]) -> dict[int, Any]:
    """Outputs of a turn, when all actors have taken it."""
    outputs, left = {}, list(asked)
    while left:
      (one,), left = ray.wait(left)
      place = asked[one]
      try:
        given, spans = ray.get(one)
      except ray.exceptions.RayError as error:
        self._fail(place, error)
        raise self._failure from None
      outputs |= {v: parcel.unpack(x) for v, x in given.items()}
      late = self._about[place]['epoch'] - self._epoch
      self.timeline.extend(
        span._replace(start=span.start + late, end=span.end + late)
        for span in spans
      )
    return outputs

  def _dead(self) -> DiedError | None:
    """Whether a process has died: then that is why others have failed."""
    asked = {actor.about.remote(): name for name, actor in self._actors.items()}
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ALIVE)
    for one in done:
      try:
        ray.get(one)
      except ray.exceptions.RayActorError as error:
        return _told(error, asked[one])
    return None

  def _fail(self, place: str, error):
    """Keeps the first failure, and stops all places."""
    if self._failure:
      return
    self._failure = self._dead() or _told(error, place)
    for name, actor in self._actors.items():
      if name != place:
        actor.fail.remote(str(self._failure))


def _told(error, place: str = '') -> BaseException:
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


def _environment(place, kind: str) -> dict[str, str]:
  """What an actor's JAX must begin with."""
  there = {
    name.upper(): str(value)
    for name in SETTINGS
    if (value := getattr(jax.config, name, None)) is not None
  }
  if kind == 'CPU':
    there |= {
      'JAX_PLATFORMS': 'cpu',
      'JAX_NUM_CPU_DEVICES': str(len(place.devices)),
    }
  else:
    there.pop('JAX_PLATFORMS', None)
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
