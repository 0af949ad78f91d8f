"""Rows of a call that a piece, a micro-batch or a device may have.

The rows of a group are adjacent. Some stages compare them, and need groups
whole. In others they only share what each part of a group can compute again,
such as the keys and values of their prompt (`Stage.divisible_groups`).
"""

from planner.ir import graph


def can_take(stage, rows: int) -> bool:
  """Whether a stage can be called with so many adjacent rows.

  They are whole groups, or one of several equal parts of a group.
  """
  group = stage.group_size
  if rows < 1 or not rows % group:
    return rows > 0
  return stage.divisible_groups and not group % rows


def ways(
  flow: graph.Flow, node: graph.Node, rows: int, devices: int
) -> int | None:
  """Returns among how many devices the rows of a call are divided.

  That is all of them if each can have as many rows. Else it is 1 for a stage
  without parameters: every device computes all rows, so that groups stay whole.
  None if the devices of a mesh cannot run the stage.

  Args:
    flow: the flow of the node.
    node: the call of a stage.
    rows: that it takes at once.
    devices: over which the mesh shards rows.
  """
  each, rest = divmod(rows, devices)
  if not rest and can_take(node.stage, each):
    return devices
  if node.stage.group_size == 1 or not can_take(node.stage, rows):
    return None
  return None if _has_parameters(flow, node) else 1


def _has_parameters(flow: graph.Flow, node: graph.Node) -> bool:
  return any(
    letter not in ('', 'B')
    for v in node.reads
    for letter in flow.values[v].letters
  )


def wanted(stage) -> str:
  """Says for messages which numbers of rows `can_take` accepts."""
  group = stage.group_size
  if group == 1:
    return 'rows'
  parts = ', or equal parts of one' if stage.divisible_groups else ''
  return f'whole groups of {group} rows{parts}'
