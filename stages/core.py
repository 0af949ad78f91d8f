"""Stage, the unit that plans place and cut: a named pure function."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sharding import mesh as mesh_lib
from stages import kernels, metrics
from stages import remat as remat_lib

# Constants to fold into a step's key, one per purpose. They lie beyond the row
# numbers that `keys` folds in, so no two purposes share a key. `EVALUATE` is
# folded into the key of a run, and lies beyond the numbers of its steps.
SHUFFLE = np.uint32(2**32 - 1)
SEEDS = np.uint32(2**32 - 2)
REPLAY = np.uint32(2**32 - 3)
CHOOSE = np.uint32(2**32 - 4)
EVALUATE = np.uint32(2**32 - 5)


class Deferred(NamedTuple):
  """A result under way, and a function to apply to it when it arrives.

  Attributes:
    future: a `concurrent.futures.Future`, or another `Deferred`.
    then: `result -> result`, applied once by `result()`.
  """

  future: Any
  then: Callable[[Any], Any]

  def result(self) -> Any:
    """Waits for the result."""
    return self.then(self.future.result())

  def cancel(self):
    """Cancels the call if it has not started; its result is not needed."""
    self.future.cancel()

  @property
  def elsewhere(self) -> Sequence[tuple[str, float, float]]:
    """Spans (worker, start, end) by `time.perf_counter`, where recorded."""
    return getattr(self.future, 'elsewhere', ())


# The scope in which an equivalent of slots attends to keys and values.
ATTENTION_SCOPE = 'attention_to_caches'


class ColumnWork(NamedTuple):
  """The work of attention in layers of one kind, for slots.

  Attributes:
    reads: the columns of keys and values that are read of each slot: 'own',
      those that its row has filled; 'longest', as many as the longest row has
      filled; 'all', also those that no row has.
    most: the largest number of columns that is read of a slot.
    window: the latest tokens that a row attends to. Where 'longest' is read,
      columns before those of all rows are not.
    beyond: columns that are read beyond those of rows, in a mean slot, as
      whole blocks are read.
    matmul_flops: operations of matrix products, in a step, for each column.
    other_flops: other operations, likewise.
    dtype: of the operands of products.
    bytes: bytes that are read and written, likewise.
    kernels: kernels that are launched in a step.
  """

  reads: Literal['own', 'longest', 'all']
  most: float
  window: float
  beyond: float
  matmul_flops: float
  other_flops: float
  dtype: str
  bytes: float
  kernels: int


class AttentionWork(NamedTuple):
  """The work of attention to the keys and values of rows in slots.

  Attributes:
    prompt: columns that a prompt fills, if it is as long as prompts may be.
    layers: the work of all layers, by their kind.
    writes_scores: whether some layers write scores to memory.
    scope: name of the scope in which `EngineCost.equivalent` computes the same.
  """

  prompt: int
  layers: tuple[ColumnWork, ...]
  writes_scores: bool
  scope: str = ATTENTION_SCOPE


class EngineCost(NamedTuple):
  """The costs of continuous batching, as a cost model reads them.

  The stage is an inference engine, if it is a host stage, or a loop in JAX in
  which rows enter slots as others end.

  Attributes:
    equivalent: a function in JAX with the arguments and results of the stage,
      and its arithmetic: decoding all rows in a loop.
    cache_bytes: bytes that an engine reserves for keys and values, on each of
      its devices; infinite if these are as many as `max_rows` rows need.
    row_cache_bytes: of an engine: with shapes of the stage's arguments, bytes
      of the keys and values of a row that is as long as it may be, prompt and
      completion; None for slots.
    max_rows: maximum number of rows that it decodes at once, on the devices
      that hold one copy of the parameters.
    ranks: numbers of devices that may divide one copy of an engine's
      parameters, the mesh axes without rows; any number if None.
    cache_shards: most devices that divide its keys and values; more devices
      hold copies.
    calls: calls with the same parameters, as planners count on, such as the
      rounds of a loop. The first of them takes the parameters over.
    attention: of slots: with the arguments of the stage, the work of attention
      on the platform traced for, in place of what `equivalent` computes in its
      `scope`; None if the stage has no slots.
    resume: of slots: as `equivalent`, for completions that are continued; None
      if they cannot be.
    continued: of slots: rows of a call that earlier ones have started. They
      enter slots together, which are as many if `max_rows` is less; devices
      have equally many of them.
    rows: of a stage of grain 'batch': rows of its arguments, given their
      shapes; None for other grains.
    resized: likewise: `rows, *arguments -> arguments`, shapes of arguments that
      have about as many rows.
  """

  equivalent: Callable[..., Any]
  cache_bytes: float
  row_cache_bytes: Callable[..., float] | None
  max_rows: int
  ranks: tuple[int, ...] | None = None
  cache_shards: float = math.inf
  calls: int = 1
  attention: Callable[..., AttentionWork] | None = None
  resume: Callable[..., Any] | None = None
  continued: int = 0
  rows: Callable[..., int] | None = None
  resized: Callable[..., tuple] | None = None


def slots_cost(
  equivalent: Callable[..., Any],
  resume: Callable[..., Any] | None,
  slots: int,
  attention: Callable,
) -> EngineCost:
  """The cost of a loop in JAX that decodes in `slots`.

  Its keys and values count with its other arrays.
  """
  return EngineCost(
    equivalent, math.inf, None, slots, attention=attention, resume=resume
  )


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
  """A named pure function over a batch.

  Called with arrays, it runs. Called with a value that defines `__record__`,
  the call is recorded instead: the operand decides, as with NumPy's
  `__array_function__`. A stage therefore does not depend on any planner.

  Attributes:
    fn: the function.
    name: its name in plans, profiles and logs.
    grain: how finely the batch may be cut.
      'row': rows in, rows out.
      'sum': rows in, sums out; `merge` adds the sums of the pieces.
      'split': rows in, a tuple of equal runs of rows out, routed, not copied.
      'slice': rows in, any rows in any order out, as row ids in an unbatched
        argument say. It needs all rows at once; its outputs may be cut again.
      'batch': the whole batch at once.
    unbatched: positions of arguments without rows, such as parameters.
    group_size: adjacent rows of a group; cuts fall between groups.
    divisible_groups: whether cuts may also divide groups into equal parts. For
      stages whose rows of a group share only what each part can compute again,
      such as the keys and values of a prompt.
    consumes: positions of arguments that the call uses up, such as a
      simulator's token, which the returned one replaces. They have rows, so
      cutting the batch cuts them too.
    host: whether `fn` runs outside JAX, on NumPy arrays. Unbatched arguments
      are passed as they are, without a copy to the host.
    out_shapes: shapes of a host stage's outputs, given shapes of its inputs.
    asynchronous: whether a host stage's `fn` returns a `Deferred`. The runtime
      starts such a call as soon as its inputs are there and waits for it at its
      turn, so that a simulator steps while a policy acts on other rows.
    engine: what a cost model reads of a stage with continuous batching; None
      for others, and for host stages whose arithmetic is not on accelerators.
    awaited: `rows -> answers`: for how many answers a call of so many rows
      waits, of a host stage that asks others, such as tools; None for others.
    rounds: for positions of arguments, `argument -> argument` with leaves in
      the types to which `fn` rounds them before it uses them. A place all of
      whose stages round a value so may hold it rounded, which changes no bit.
  """

  fn: Callable[..., Any]
  name: str
  grain: Literal['row', 'sum', 'split', 'slice', 'batch'] = 'row'
  unbatched: tuple[int, ...] = ()
  group_size: int = 1
  divisible_groups: bool = False
  consumes: tuple[int, ...] = ()
  host: bool = False
  out_shapes: Callable[..., Any] | None = None
  asynchronous: bool = False
  engine: EngineCost | None = None
  awaited: Callable[[int], int] | None = None
  rounds: Mapping[int, Callable[[Any], Any]] = dataclasses.field(
    default_factory=dict
  )

  def __post_init__(self):
    if self.host and self.out_shapes is None:
      raise ValueError(
        f'Stage {self.name} runs on the host, where JAX cannot infer the '
        f'shapes '
        'of its outputs: give it `out_shapes`.'
      )
    if self.asynchronous and not self.host:
      raise ValueError(
        f'Stage {self.name} is asynchronous, which only a host stage can be: '
        'give it host=True, or leave out asynchronous.'
      )
    both = sorted({*self.consumes} & {*self.unbatched})
    if both and self.grain != 'batch':
      raise ValueError(
        f'Stage {self.name} consumes its unbatched arguments {both}: every '
        'piece of a batch would consume the same value. Give them rows, or '
        "choose grain 'batch'."
      )

  def __call__(self, *args):
    for leaf in jax.tree.leaves(args):
      if hasattr(leaf, '__record__'):
        return leaf.__record__(self, args)
    return self.run(*args)

  @functools.cached_property
  def run(self):
    if self.host:
      return self.run_on_host
    return self._jitted(remat_lib.NONE)

  def _jitted(self, policy: str):
    fn = kernels.recorded(self.fn, self.attention)
    fn = mesh_lib.noting_sizes(fn, self.axes_read)
    return jax.jit(remat_lib.applied(fn, policy, self._readers))

  @functools.cached_property
  def attention(self) -> dict[str, set[kernels.Choice]]:
    """Implementations of attention, by the platforms this was traced for."""
    return {}

  @functools.cached_property
  def axes_read(self) -> set[str]:
    """Axes of meshes whose sizes its program read where this was traced."""
    return set()

  def attention_work(self, *args) -> AttentionWork | None:
    """`EngineCost.attention`, given shapes of the inputs; None without it."""
    work = self.engine and self.engine.attention
    return work and kernels.recorded(work, self.attention)(*args)

  def remat_policies(self, *args) -> tuple[str, ...]:
    """Policies that a plan may choose from, given shapes of the inputs.

    There are none if no model of the stage leaves the policy to the plan.
    """
    if self.host:
      return ()
    jax.eval_shape(self.run, *args)  # Traces it, unless a flow has.
    return remat_lib.POLICIES if self.reads_remat else ()

  @property
  def reads_remat(self) -> bool:
    """Whether a model read the policy of a plan when this was traced."""
    return bool(self._readers)

  def run_with_remat(self, policy: str):
    """Returns `run` with the activations stored that a policy says.

    Args:
      policy: as in `remat.check`.
    """
    remat_lib.check(policy)
    if policy not in self._by_remat:
      self._by_remat[policy] = self._jitted(policy)
    return self._by_remat[policy]

  @functools.cached_property
  def _by_remat(self) -> dict[str, Callable[..., Any]]:
    return {}

  @functools.cached_property
  def _readers(self) -> set[str]:
    """The policies that a model read while the stage was traced."""
    return set()

  def run_on_host(self, *args):
    """Calls a host stage and waits for its result."""
    return self.finish(self.start(*args), *args)

  def start(self, *args):
    """Starts a call of a host stage."""
    given = [
      arg if i in self.unbatched else jax.device_get(arg)
      for i, arg in enumerate(args)
    ]
    return self.fn(*given)

  def finish(self, started, *args):
    """Waits for a call.

    Raises:
      TypeError: if its outputs have other shapes than `out_shapes` says.
    """
    out = started.result() if self.asynchronous else started
    want, got = jax.tree.flatten(self.out_shapes(*args)), jax.tree.flatten(out)
    wants = [(x.shape, x.dtype) for x in want[0]]
    gots = [(np.shape(x), np.asarray(x).dtype) for x in got[0]]
    if (want[1], wants) != (got[1], gots):
      raise TypeError(
        f'Stage {self.name} declares outputs {want[1]} of {wants} by its '
        f'`out_shapes`, but returned {got[1]} of {gots}.'
      )
    return out

  def shapes(self, *args):
    """Shapes of the outputs, given shapes of the inputs."""
    return (
      self.out_shapes(*args) if self.host else jax.eval_shape(self.run, *args)
    )

  merge = staticmethod(metrics.merge)


def stage(name: str, grain='row', unbatched=(), **kwargs):
  """Makes a `Stage` of the decorated function."""
  return lambda fn: Stage(fn, name, grain, unbatched, **kwargs)


@stage('keys', 'batch')
def keys(key, rows):
  """Derives one key per row from the row's index in the whole batch.

  Cutting, placing or sharding the batch therefore changes no random draw.
  """
  B = jax.tree.leaves(rows)[0].shape[0]
  return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(B))
