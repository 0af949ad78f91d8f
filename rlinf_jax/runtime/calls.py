"""Calls of a runtime: steps and evaluations, and the futures of their info."""

from concurrent import futures

import jax

from planner.ir import graph as graph_lib


class Calls:
  """The calls that every `base.Runtime` makes in the same way.

  A runtime defines `wait`, and `_submit`, which starts a call of a flow and
  returns the future of its info.
  """

  def submit(self, batch, key) -> futures.Future:
    return self._submit('step', batch, key)

  def step(self, batch, key):
    info = self.submit(batch, key)
    self.wait()
    return info.result()

  def evaluate(self, batch, key):
    info = self._submit('evaluate', batch, key)
    self.wait()
    return info.result()


def shapes_of(inputs) -> tuple[tuple[int, ...], ...]:
  """The shapes of a call's inputs, in the order of the flow's."""
  return tuple(x.shape for x in jax.tree.leaves(inputs))


def shapes_of_flow(flow: graph_lib.Flow) -> tuple[tuple[int, ...], ...]:
  """The shapes of the inputs that a flow was recorded with."""
  return tuple(flow.values[v].shape for v in flow.inputs)


def info_of(flow: graph_lib.Flow, outputs: futures.Future) -> futures.Future:
  """The future of a flow's info, from that of its outputs by value."""
  info = futures.Future()

  def resolve(outputs):
    error = outputs.exception()
    if error:
      info.set_exception(error)
      return
    leaves = [outputs.result()[v] for v in flow.outputs]
    info.set_result(jax.tree.unflatten(flow.out_tree, leaves))

  outputs.add_done_callback(resolve)
  return info
