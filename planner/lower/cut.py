"""Cuts a flow's batch into pieces, so that stages may overlap on one step.

A stage of grain 'row' or 'sum' is called once for each piece. The sums of
pieces are added one after another, in the order of their rows. A run of rows
consists of whole pieces. Before a stage of grain 'batch' or 'slice' the pieces
are joined. The runs of rows that a slice returns are cut into pieces of the
same size as before where that divides them evenly. A loop reads and returns
whole values, and its body is cut by itself. The cut flow computes the same
values at other times.
"""

import dataclasses
import functools

from planner.ir import graph, groups


@functools.cache
def splits(pieces: int) -> graph.Plumbing:
  """Returns the stage that splits the rows of an array into `pieces` arrays."""

  def split(x):
    n = x.shape[0] // pieces
    return [x[i * n : (i + 1) * n] for i in range(pieces)]

  return graph.Plumbing('split', split)


def _join(*parts):
  return [parts[0].__array_namespace__().concat(parts)]


JOIN = graph.Plumbing('join', _join)


@functools.cache
def totals(stage, out_tree) -> graph.Plumbing:
  """Returns the stage that adds the sums of two pieces, given their leaves."""

  def total(*leaves):
    half = len(leaves) // 2
    one = out_tree.unflatten(leaves[:half])
    other = out_tree.unflatten(leaves[half:])
    return out_tree.flatten_up_to(stage.merge(one, other))

  return graph.Plumbing('total', total, 'sum')


class _Cutter:
  """The state of cutting a flow.

  Attributes:
    nodes: the nodes of the cut flow, each with its due time.
    values: the values of the flow, followed by pieces of them.
    parts: the pieces of each value that is in pieces.
    entire: ids of values that exist as a whole.
    runs: the number of pieces of each run of rows that is not cut yet.
    due: the due time of each value: how often its rows were joined, and the
      last piece that it contains.
  """

  def __init__(self, flow: graph.Flow, pieces: int):
    self.pieces = pieces
    self.nodes, self.values = [], list(flow.values)
    self.parts, self.runs, self.due = {}, {}, {}
    self.entire = {*flow.inputs, *(start for start, _ in flow.carry)}

  def new(self, v: int, pieces: int = 1) -> int:
    """Adds a value that is like a piece of `v`."""
    value = self.values[v]
    shape = value.shape
    if pieces > 1:
      shape = (shape[0] // pieces, *shape[1:])
    self.values.append(dataclasses.replace(value, shape=shape))
    return len(self.values) - 1

  def add(self, node: graph.Node):
    """Appends a node, due as soon as the last value that it reads."""
    due = max((self.due.get(v, (0, 0)) for v in node.reads), default=(0, 0))
    self.due |= dict.fromkeys(node.writes, due)
    self.nodes.append((due, node))

  def split(self, v: int, pieces: int) -> list[int]:
    """Returns the pieces of `v`, which is split if necessary."""
    if v not in self.parts:
      parts = [self.new(v, pieces) for _ in range(pieces)]
      self.add(graph.Node(splits(pieces), (v,), tuple(parts)))
      joined, last = self.due.get(v, (0, 0))
      self.due |= {
        piece: (joined + (last > 0), i) for i, piece in enumerate(parts)
      }
      self.parts[v] = parts
    return self.parts[v]

  def join(self, v: int):
    """Joins `v` if it exists only in pieces."""
    if v not in self.entire:
      self.entire.add(v)
      self.add(graph.Node(JOIN, tuple(self.parts[v]), (v,)))

  def repeat(self, node: graph.Node):
    """Adds a call of a node for each piece."""
    cut = [len(self.parts[v]) for v in node.rows if v in self.parts]
    cut = cut or [self.runs[v] for v in node.rows if v in self.runs]
    pieces = max(cut, default=self.pieces)
    self.check(node, pieces)
    if len({*cut}) > 1:
      numbers = ' and '.join(map(str, cut))
      raise ValueError(
        f'{node.name} reads rows that are cut into {numbers} parts.'
      )
    parts = {v: self.split(v, pieces) for v in sorted(node.rows)}
    for v in set(node.reads) - node.rows:
      self.join(v)
    sums = node.stage.grain == 'sum'
    made = []
    for i in range(pieces):
      writes = node.writes
      if pieces > 1:
        writes = tuple(self.new(v, 1 if sums else pieces) for v in writes)
      self.add(
        dataclasses.replace(
          node,
          reads=tuple(parts[v][i] if v in parts else v for v in node.reads),
          writes=writes,
          rows=frozenset(parts[v][i] for v in node.rows),
          piece=(i, pieces),
          consumes=frozenset(parts[v][i] for v in node.consumes),
        )
      )
      made.append(writes)
    if sums:
      self.add_up(node, made)
    else:
      self.parts |= dict(
        zip(node.writes, map(list, zip(*made, strict=True)), strict=True)
      )
    if sums or pieces == 1:
      self.entire.update(node.writes)

  def add_up(self, node: graph.Node, made: list[tuple[int, ...]]):
    """Adds the sums of pieces one after another, in the order of their rows."""
    total = totals(node.stage, node.out_tree)
    so_far = made[0]
    for i, sums in enumerate(made[1:], 2):
      writes = node.writes
      if i < len(made):
        writes = tuple(self.new(v) for v in node.writes)
      self.add(graph.Node(total, (*so_far, *sums), writes))
      so_far = writes

  def route(self, node: graph.Node):
    """Assigns whole pieces to runs of rows, which computes nothing."""
    runs = len(node.writes) // len(node.reads)
    for i, v in enumerate(node.reads):
      each = len(self.parts[v]) // runs
      for j in range(runs):
        run = node.writes[j * len(node.reads) + i]
        self.parts[run] = self.parts[v][j * each : (j + 1) * each]

  def can_route(self, node: graph.Node) -> bool:
    """Whether every run of a split consists of whole pieces."""
    runs = len(node.writes) // max(1, len(node.reads))
    return bool(runs) and all(
      v in self.parts and not len(self.parts[v]) % runs for v in node.reads
    )

  def keep(self, node: graph.Node):
    """Calls a node once, on whole values."""
    for v in node.reads:
      self.join(v)
    self.add(node)
    self.entire.update(node.writes)
    if node.stage.grain == 'slice' and node.writes:
      rows = max(self.values[v].shape[0] for v in node.rows)
      for v in node.writes:
        times, remainder = divmod(self.pieces * self.values[v].shape[0], rows)
        self.runs[v] = 1 if remainder else times

  def check(self, node: graph.Node, pieces: int):
    for rows in {self.values[v].shape[0] for v in node.rows}:
      if rows % pieces or not groups.can_take(node.stage, rows // pieces):
        raise ValueError(
          f'Stage {node.name} has {rows} rows in groups of '
          f'{node.stage.group_size}, which cannot be cut into {pieces} pieces '
          f'of {groups.wanted(node.stage)}: choose '
          f'a number of pieces that divides {rows // node.stage.group_size}.'
        )


def cut(flow: graph.Flow, pieces: int) -> graph.Flow:
  """Returns an equivalent flow whose batch passes in `pieces` pieces.

  Args:
    flow: as recorded.
    pieces: number of pieces of a batch, which its minibatches divide.

  Raises:
    ValueError: if a piece would split a group of rows.
  """
  if pieces == 1:
    return flow
  cutter = _Cutter(flow, pieces)
  for node in flow.nodes:
    if node.stage.grain == 'split' and cutter.can_route(node):
      cutter.route(node)
    elif node.stage.grain in ('row', 'sum') and node.rows:
      cutter.repeat(node)
    elif node.body:
      body = cut(node.body, pieces)
      cutter.keep(dataclasses.replace(node, body=body))
    else:
      cutter.keep(node)
  for v in (*flow.outputs, *(end for _, end in flow.carry)):
    cutter.join(v)
  nodes = sorted(cutter.nodes, key=lambda pair: pair[0])
  return dataclasses.replace(
    flow,
    nodes=tuple(node for _, node in nodes),
    values=tuple(cutter.values),
  )
