"""The graph of a workflow, recorded by calling it with symbols.

A workflow is a function `carry, *inputs -> carry, outputs` over stages. Calling
it once with `Ref`s in place of arrays records which stage feeds which. The
function itself stays ordinary Python: called with arrays, it just runs.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax

from planner.ir import consumption as consumption_lib
from planner.ir import graph
from sharding import rules


@dataclasses.dataclass(frozen=True, eq=False)
class Ref:
  """A symbol of a value that is not computed yet: its shape and its id."""

  id: int
  shape: tuple[int, ...]
  dtype: Any
  recorder: 'Recorder' = dataclasses.field(repr=False)

  def __record__(self, stage, args):
    return self.recorder.call(stage, args)

  def __getattr__(self, name):
    if name.startswith('__'):
      raise AttributeError(name)
    self._refuse(f'read .{name} of')

  def _refuse(self, did: str):
    raise TypeError(
      f'A workflow step {did} a value {self.dtype}{list(self.shape)} that no '
      'stage has computed yet. A step only routes values between stages: move '
      'this into a stage.'
    )


def _refusal(did):
  return lambda self, *_, **__: self._refuse(did)


for _did, _names in {
  'did arithmetic with': 'add radd sub rsub mul rmul truediv rtruediv floordiv '
  'rfloordiv mod rmod divmod rdivmod pow rpow matmul rmatmul neg pos abs round '
  'and rand or ror xor rxor invert lshift rshift',
  'compared': 'lt le gt ge eq ne',
  'indexed': 'getitem setitem',
  'looped over': 'iter len',
  'looked into': 'contains',
  'branched on': 'bool',
  'converted': 'float int index complex array',
}.items():
  for _name in _names.split():
    setattr(Ref, f'__{_name}__', _refusal(_did))
Ref.__hash__ = object.__hash__


FOREIGN = 'another recording. A step may keep only its state from call to call.'


class Recorder:
  """Collects nodes while a workflow runs on symbols."""

  def __init__(self):
    self.nodes: list[graph.Node] = []
    self.values: list[graph.Value] = []
    self.in_dtype: dict[tuple[int, Any], int] = {}
    self.reads = consumption_lib.ReadTracker()

  def new(self, origin: str, path, like) -> Ref:
    letters = rules.dimensions(path, like.shape) or ('',) * len(like.shape)
    name = origin + jax.tree_util.keystr(path, simple=True, separator='.')
    self.values.append(graph.Value(name, like.shape, like.dtype, letters))
    return Ref(len(self.values) - 1, like.shape, like.dtype, self)

  def tree(self, origin: str, like):
    return jax.tree_util.tree_map_with_path(
      functools.partial(self.new, origin), like
    )

  def call(self, stage, args):
    reads, in_tree = jax.tree.flatten(args)
    for leaf in reads:
      if not isinstance(leaf, Ref):
        raise TypeError(
          f'Stage {stage.name} was given a {type(leaf).__name__} that the step '
          'made itself. A step only routes: carry the value in the state, or '
          'make it in a stage.'
        )
      if leaf.recorder is not self:
        raise TypeError(f'Stage {stage.name} was given a value of {FOREIGN}')
    likes, body = jax.tree.unflatten(in_tree, shapes(reads)), None
    try:
      if hasattr(stage, 'body'):
        body, made = trace_body(stage, *likes), likes[0]
      else:
        made = stage.shapes(*likes)
    except Exception as error:
      error.add_note(f'This happened in stage {stage.name}, while recorded.')
      raise
    made = self.tree(f'{stage.name}.', made)
    writes, out_tree = jax.tree.flatten(made)
    reads = ids(reads)
    args = jax.tree.unflatten(in_tree, reads)
    node = graph.Node(
      stage,
      reads,
      ids(writes),
      with_rows(stage, args),
      in_tree,
      out_tree,
      consumes=used_up(stage, args),
      body=body,
      rounded=self.rounded(stage, args, likes),
    )
    if body:
      used = {v for inner in body.nodes for v in inner.consumes}
      used = frozenset(v for x, v in node.ids_before.items() if x in used)
      node = dataclasses.replace(node, consumes=used)
      for x, dtype in body.in_dtype:
        if x in body.inputs:
          self.round(node.ids_before[x], dtype)
    self.check(node)
    self.reads.add(stage.name, reads, node.consumes, self.name)
    self.nodes.append(node)
    return made

  def rounded(self, stage, args, likes) -> tuple[tuple[int, int], ...]:
    """Returns the values that a stage rounds, as `graph.Node.rounded`.

    Values with rows are left out, and those that it also reads as they are.
    """
    rounds = getattr(stage, 'rounds', None)
    if not rounds:
      return ()
    made = tuple(
      jax.eval_shape(rounds[i], like) if i in rounds else like
      for i, like in enumerate(likes)
    )
    if jax.tree.structure(made) != jax.tree.structure(likes):
      raise TypeError(
        f'Stage {stage.name} rounds its arguments to {jax.tree.structure(made)}'
        f', and was given {jax.tree.structure(likes)}: `rounds` may only '
        'change types.'
      )
    dtypes, rows = {}, with_rows(stage, args)
    for v, x in zip(jax.tree.leaves(args), jax.tree.leaves(made), strict=True):
      dtypes.setdefault(v, set()).add(x.dtype)
    return tuple(
      (v, self.round(v, dtype))
      for v, (dtype, *others) in dtypes.items()
      if not others and dtype != self.values[v].dtype and v not in rows
    )

  def round(self, v: int, dtype) -> int:
    """Returns the value that describes `v` in another type."""
    if (v, dtype) not in self.in_dtype:
      value = dataclasses.replace(self.values[v], dtype=dtype)
      self.values.append(value)
      self.in_dtype[v, dtype] = len(self.values) - 1
    return self.in_dtype[v, dtype]

  def round_carried(self, carry):
    """Describes both ends of carried values in the types of either."""
    known = -1
    while known < len(self.in_dtype):  # Ends may be starts of other pairs.
      known = len(self.in_dtype)
      types = {}
      for v, dtype in self.in_dtype:
        types.setdefault(v, []).append(dtype)
      for start, end in carry:
        for dtype in types.get(start, ()) if start != end else ():
          self.round(end, dtype)
        for dtype in types.get(end, ()) if start != end else ():
          self.round(start, dtype)

  def name(self, v: int) -> str:
    return self.values[v].name

  def check(self, node: graph.Node):
    """Checks that the values of a node have equally many rows; marks them."""
    grain, sets = node.stage.grain, [node.rows]
    if grain == 'row':
      sets = [node.rows | set(node.writes)]
    elif grain in ('split', 'slice'):
      sets = [node.rows, set(node.writes)]
    for rows in sets:
      sizes = {self.values[v].shape[:1] for v in rows}
      if len(sizes) > 1 or () in sizes:
        raise TypeError(
          f'Stage {node.name} of grain {grain!r} has values of different rows: '
          f'{sorted(sizes)}. Name its arguments without rows in `unbatched`, '
          "or give it grain 'batch'."
        )
      for size, *_ in sizes:
        if size % node.stage.group_size:
          raise TypeError(
            f'Stage {node.name} keeps groups of {node.stage.group_size} rows '
            f'together and was given {size} rows.'
          )
      for v in rows:
        value = self.values[v]
        if not any(value.letters):
          letters = ('B',) + ('',) * (len(value.shape) - 1)
          self.values[v] = dataclasses.replace(value, letters=letters)


def with_rows(stage, args) -> frozenset[int]:
  """Returns the ids of those arguments of a stage that have rows."""
  if stage.grain == 'batch':
    return frozenset()
  return frozenset(
    v
    for i, arg in enumerate(args)
    if i not in stage.unbatched
    for v in jax.tree.leaves(arg)
  )


def used_up(stage, args) -> frozenset[int]:
  """Returns the ids of those arguments that a stage uses up."""
  return frozenset(v for i in stage.consumes for v in jax.tree.leaves(args[i]))


def ids(refs) -> tuple[int, ...]:
  """Returns the ids of symbols."""
  return tuple(ref.id for ref in refs)


def shapes(tree):
  """Returns the shapes and types of a tree of arrays."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def trace(step: Callable, carry, *inputs) -> graph.Flow:
  """Records `step: carry, *inputs -> carry, outputs`.

  Args:
    step: the step of a workflow.
    carry: the state, as arrays or as `jax.ShapeDtypeStruct`s.
    *inputs: the other arguments, likewise.

  Raises:
    TypeError: if the step computes, or returns a state of another structure.
    ValueError: if the name of a parameter does not spell its dimensions.
  """
  rules.check_parameters(carry)
  recorder = Recorder()
  carry = recorder.tree('state.', shapes(carry))
  inputs = recorder.tree('input.', shapes(inputs))
  end, outputs = _recorded(step, carry, *inputs)
  _check_state(recorder, carry, end)
  leaves, out_tree = jax.tree.flatten(outputs)
  _check_made(recorder, leaves)
  kept = tuple(
    zip(ids(jax.tree.leaves(carry)), ids(jax.tree.leaves(end)), strict=True)
  )
  recorder.reads.check_end(kept, ids(leaves), recorder.name)
  recorder.round_carried(kept)
  return graph.Flow(
    nodes=tuple(recorder.nodes),
    values=tuple(recorder.values),
    inputs=ids(jax.tree.leaves(inputs)),
    outputs=ids(leaves),
    carry=kept,
    out_tree=out_tree,
    carry_tree=jax.tree.structure(carry),
    rounded=tuple((v, w) for (v, _), w in recorder.in_dtype.items()),
  )


def trace_body(loop, carry, *given) -> graph.Flow:
  """Records one round of a loop, `carry, *given -> carry, done`.

  Raises:
    TypeError: if a round cannot follow another.
  """
  body = trace(loop.body, carry, *given)
  if not body.nodes:
    raise TypeError(f'The body of {loop.name} calls no stage.')
  done = [(x.shape, x.dtype) for x in (body.values[v] for v in body.outputs)]
  if done not in ([], [((), jax.numpy.dtype(bool))]):
    raise TypeError(
      f'The body of {loop.name} must return `carry, done`, where `done` is one '
      'boolean that a stage has made, or None if it always goes '
      f'round {loop.at_most} times; it returned {done}.'
    )
  ends = [end for _, end in body.carry]
  for start, end in body.carry:
    name = body.values[start].name
    if end in body.inputs:
      raise TypeError(
        f'The body of {loop.name} returns what it was given as {name}: make '
        'what it carries in a stage.'
      )
    if ends.count(end) > 1:
      raise TypeError(
        f'The body of {loop.name} returns {body.values[end].name} more than '
        f'once, {name} being one of them: a round may overwrite what it '
        'carries, so carry it once.'
      )
  for node in body.nodes:
    for v in node.consumes.intersection(body.inputs):
      raise TypeError(
        f'Stage {node.name} in the body of {loop.name} uses up '
        f'{body.values[v].name} in every round: carry it.'
      )
  return body


def _recorded(step, *args):
  """Calls a step with `Ref`s and checks that it returns a pair."""
  try:
    made = step(*args)
  except TypeError as error:
    if str(Ref) not in str(error):
      raise
    # A library refused an unknown type of value.
    raise TypeError(
      'A workflow step gave a value that no stage has computed yet to a '
      f'function that is not a stage ({str(error).splitlines()[0]}) A step '
      'only routes values between stages: move this into a stage.'
    ) from error
  if not isinstance(made, tuple) or len(made) != 2:
    raise TypeError(
      'A step must return two things, `state, outputs`; this one returned a '
      f'{type(made).__name__}.'
    )
  return made


def _check_made(recorder, leaves):
  for leaf in leaves:
    if not isinstance(leaf, Ref):
      raise TypeError(
        f'The step returns a {type(leaf).__name__} that no stage made. A step '
        'only routes values between stages: make it in a stage.'
      )
    if leaf.recorder is not recorder:
      raise TypeError(f'The step returns a value of {FOREIGN}')


def _check_state(recorder, carry, end):
  was, now = jax.tree.structure(carry), jax.tree.structure(end)
  if was != now:
    raise TypeError(
      f'The step must return a state like the one it took: {was} became {now}.'
    )
  _check_made(recorder, jax.tree.leaves(end))
  for a, b in zip(jax.tree.leaves(carry), jax.tree.leaves(end), strict=True):
    if (a.shape, a.dtype) != (b.shape, b.dtype):
      raise TypeError(
        'The step must return a state like the one it took: '
        f'{recorder.values[a.id].name} went from {a.dtype}{list(a.shape)} to '
        f'{b.dtype}{list(b.shape)}.'
      )
