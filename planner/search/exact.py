"""Finds the fastest plan of a declared space, and proves that it is.

The time of a plan is the simulated time of its programs. Simulating all plans
would take too long, so this is branch and bound: sets of plans that differ in
the sizes of their places are split, smallest lower bound first. A set is
dropped when its lower bound is no less than the time of the best plan so far.
When no set is left, the best plan is the fastest. If the search is stopped
earlier, the smallest remaining bound gives its gap. A search that is stopped
before its first simulation still has a plan of one place that fits.

A search that is not done in half of its time tries RLinf's Algorithm 1, too,
so that it does not end with a slower plan. It does not begin with it, since
Algorithm 1 often takes longer than the proof.
"""

import heapq
import itertools

import numpy as np

from planner.costs import cost_model
from planner.ir import graph
from planner.search import algorithm1, branch_and_bound, timing
from planner.search import deadline as deadline_lib
from planner.search import result as result_lib
from planner.search.plans import choices as choices_lib
from planner.search.plans import fitting
from planner.search.plans import space as space_lib

ROUNDING = 1e-9  # Sums of the same seconds differ by less, relatively.
LATE = 1 / 2  # Share of a search's time after which it tries Algorithm 1.
SHARE = 1 / 2  # Largest share of the time left then that Algorithm 1 takes.


def search(
  flow: graph.Flow,
  model: cost_model.Model,
  space: space_lib.Space,
  *,
  staleness: int = 0,
  keep: int = 5,
  deadline: deadline_lib.Deadline = deadline_lib.NEVER,
  below: float = np.inf,
) -> result_lib.SearchResult:
  """Returns the fastest plan of a space, with a certificate.

  Args:
    flow: as recorded.
    model: the cost model.
    space: the plans to search.
    staleness: number of steps that may begin before an earlier one has ended.
    keep: how many of the fastest plans to return.
    deadline: when to stop; the gap then says what is not proved.
    below: seconds of a step. Only faster plans are searched for, and the
      certificate then says that there is none.
  """
  return Search(flow, model, space, staleness, keep, below, deadline).run()


class Search:
  """The state of a search.

  Attributes:
    best: seconds of the fastest plan so far, or the limit it must stay below.
    proved: lower bound on the seconds of every plan that was neither simulated
      nor excluded. It does not count work that the deadline interrupted.
    open: sets of plans that may contain a faster one, by number of pieces.
    leaves: a heap of plans that may be faster, by lower bound.
    known: plans that were simulated, or need too much memory.
  """

  def __init__(
    self,
    flow,
    model,
    space,
    staleness,
    keep,
    below=np.inf,
    deadline=deadline_lib.NEVER,
  ):
    self.choices = choices_lib.Choices(flow, model, space, deadline)
    self.deadline, self.proved, self.open = deadline, 0.0, {}
    self.late = deadline.part(LATE)
    self.space, self.staleness, self.keep = space, staleness, keep
    # The share of a step that passes before the next one begins.
    self.share = 1 / (1 + staleness)
    self.best, self.below, self.ranked = below, below, []
    self.leaves, self.counter = [], itertools.count()
    self.tried = self.simulated = 0
    self.visited, self.known = set(), set()
    # Those of Algorithm 1 need not have the least number of places, and a
    # limit to stay below is a known plan's.
    self.may_adopt = space.min_places == 1 and below == np.inf

  @property
  def enough(self) -> float:
    """Plans whose bound reaches this many seconds cannot be the best."""
    return self.best * (1 - ROUNDING)

  def run(self) -> result_lib.SearchResult:
    """Searches until the best plan is proved, or time is up."""
    if not self.choices.cuts:
      raise ValueError(
        'The batch cannot pass in any number of pieces of the space: '
        + ' '.join(
          f'In {pieces}: {why}' for pieces, why in self.choices.uncut.items()
        )
      )
    try:
      self._start()
      self._split_sets()
    except deadline_lib.TimeUp:  # `proved` says what is known.
      whole = self.space.min_places == 1 and self.below == np.inf
      if whole and not self.ranked:
        self._simulate_first()
    return self._result()

  def _simulate_first(self):
    """Simulates the first plan of one place that fits, past the deadline."""
    self.choices.deadline = deadline_lib.NEVER
    for choice in self._of_one_place():
      if not self.choices.overflows(choice):
        self.simulated += 1
        found = timing.simulate(self.choices, choice, self.staleness)
        self.ranked, self.best = [found], found[1]
        break
    self.choices.deadline = self.deadline

  def _of_one_place(self):
    """Yields the fastest plan of one place on each mesh, in fewest pieces."""
    units, (block,) = (self.choices.units,), self.choices.blocks[0]
    cut = self.choices.cuts[min(self.choices.cuts)]
    for offload, mesh in itertools.product(
      self.choices.offloads, self.choices.menu(block, *units)
    ):
      choice = choices_lib.Choice(cut.pieces, 0, units, (mesh,), ((),), offload)
      executions = fitting.fastest(self.choices, cut, choice, 0)
      if executions is not None:
        yield choice._replace(executions=(executions,))

  def _start(self):
    """Opens the sets of all plans, and simulates a plan of one place."""
    self.open_sets()
    for opened in self.open.values():
      opened.add(*self._all_plans(), self)
      if self.space.min_places == 1:
        self._add_leaves(opened, [(0, (self.choices.units,))])
    while self.leaves and not self.simulated:
      self._simulate_best()

  def open_sets(self):
    """Tabulates the costs that sets of plans are bounded by."""
    for pieces, cut in self.choices.cuts.items():
      self.open[pieces] = branch_and_bound.PlanSets(self.choices, cut)

  def _split_sets(self):
    """Splits sets and simulates plans until none may be faster."""
    iteration = itertools.count()
    while self._least() < self.enough:
      self.proved = self._least()
      self.deadline.check()
      if self.may_adopt and self.late.has_passed:
        self.may_adopt = False
        self._adopt_algorithm1()
        continue  # The least set may be hopeless now.
      while self.leaves and self.leaves[0][0] <= self._least_open():
        if self.leaves[0][0] >= self.enough:
          break
        self._simulate_best()
      opened = min(self.open.values(), key=lambda o: o.least)
      if not next(iteration) % 8:
        for some in self.open.values():
          for sizes in some.guess(self):
            self._add_leaves(some, [sizes])
            self._simulate_best()
            self._simulate_best()
      if opened.least < self.enough:
        self._add_leaves(opened, opened.split(self))
        self._simulate_best()
    self.proved = np.inf

  def _adopt_algorithm1(self):
    """Simulates the plans of Algorithm 1, as far as its time suffices."""
    leaves, self.leaves = self.leaves, []
    self.choices.deadline = self.deadline.part(SHARE)
    try:
      for cut in self.choices.cuts.values():
        choice = algorithm1.choose(self.choices, cut).choice
        if choice is not None:
          self._push(choice, 0.0, self._seconds(cut, choice))
          while self.leaves:  # Its bound is raised, and then it is simulated.
            self._simulate_best()
    except deadline_lib.TimeUp:
      pass  # The search goes on, with the plans that there was time for.
    finally:
      self.choices.deadline, self.leaves = self.deadline, leaves

  def _seconds(self, cut, choice):
    """Returns the seconds of the nodes of a plan, [N, 1]."""
    places = zip(
      self.choices.blocks[choice.part],
      choice.units,
      choice.axes,
      choice.executions,
      strict=True,
    )
    return sum(self.choices.column(cut, *place) for place in places)[:, None]

  def _all_plans(self):
    """Returns every partition, as the set of all its plans."""
    blocks, units = self.choices.blocks, self.choices.units
    sizes = np.array([len(some) for some in blocks])
    there = np.arange(self.space.max_places) < sizes[:, None]
    fits = np.flatnonzero(sizes <= units)
    low = there.astype(int)[fits]
    return fits, low, low * units

  def _least_open(self):
    return min((opened.least for opened in self.open.values()), default=np.inf)

  def _least(self):
    leaf = self.leaves[0][0] if self.leaves else np.inf
    return min(leaf, self._least_open())

  def bound(self, opened, seconds, at, delays=None, waits=None):
    """Returns lower bounds on the seconds of a step, one a column."""
    self.deadline.check()
    self.tried += seconds.shape[1]
    return opened.cut.bounds.period(
      seconds, at, self.share, delays, waits, self.enough
    )

  def _add_leaves(self, opened, sizes):
    """Bounds all plans whose places have given sizes, and keeps good ones.

    Args:
      opened: the sets that they are from.
      sizes: pairs of a partition and the units of its places.
    """
    plans = itertools.chain(*(self._plans(opened, *some) for some in sizes))
    while some := list(itertools.islice(plans, branch_and_bound.BATCH)):
      plan_choices, columns = zip(*some, strict=True)
      seconds = np.stack(columns, axis=1)
      at = np.stack(
        [
          self.choices.place_of[choice.part][opened.cut.group]
          for choice in plan_choices
        ],
        axis=1,
      )
      bounds = self.bound(opened, seconds, at)
      for k in np.flatnonzero(bounds < self.enough):
        self._push(plan_choices[k], bounds[k], seconds[:, k : k + 1])

  def _plans(self, opened, part: int, units):
    """Yields the plans whose places have given sizes, if they are new.

    Each comes with the seconds of its nodes, [N].
    """
    choices, cut = self.choices, opened.cut
    if (cut.pieces, part, units) in self.visited:
      return
    self.visited.add((cut.pieces, part, units))
    blocks = choices.blocks[part]
    for offload in choices.offloads:
      fitting = [
        choices.fitting(cut, part, b, n, offload) for b, n in enumerate(units)
      ]
      columns = [
        [choices.column(cut, block, n, *option) for option in options]
        for block, n, options in zip(blocks, units, fitting, strict=True)
      ]
      for way in itertools.product(*(range(len(some)) for some in fitting)):
        axes, executions = zip(
          *(fitting[b][o] for b, o in enumerate(way)), strict=True
        )
        choice = choices_lib.Choice(
          cut.pieces, part, units, axes, executions, offload
        )
        yield choice, sum(columns[b][o] for b, o in enumerate(way))

  def _push(self, choice, bound, seconds):
    heapq.heappush(self.leaves, (bound, next(self.counter), choice, seconds))

  def _simulate_best(self):
    """Simulates the plan of the smallest bound.

    First its bound is raised by the time of its moves.
    """
    if not self.leaves:
      return
    self.deadline.check()
    bound, _, choice, seconds = heapq.heappop(self.leaves)
    if bound >= self.enough:
      self.leaves.clear()
      return
    if seconds is not None:
      opened = self.open[choice.pieces]
      at = self.choices.place_of[choice.part][opened.cut.group][:, None]
      delays, waits, more = timing.moves(self.choices, choice, self.share)
      bound = self.bound(opened, seconds + more, at, delays, waits)[0]
      if bound < self.enough:
        self._push(choice, bound, None)
      return
    if choice in self.known:  # It came from Algorithm 1, or that came later.
      return
    self.known.add(choice)
    if self.choices.overflows(choice):
      return
    self.simulated += 1
    chosen, found = timing.simulate(self.choices, choice, self.staleness)
    found = chosen, max(found, bound)
    self.ranked = sorted([*self.ranked, found], key=lambda pair: pair[1])
    del self.ranked[self.keep :]
    self.best = min(self.best, found[1])

  def _result(self) -> result_lib.SearchResult:
    best = None
    if self.ranked and not self.below <= self.ranked[0][1]:
      best = self.ranked[0][0]
    bound = self.best if self.proved >= self.enough else self.proved
    gap = 0.0 if bound >= self.best else 1.0
    if self.best < np.inf:
      gap = 1 - bound / self.best if self.best else 0.0
    return result_lib.SearchResult(
      best,
      self.best,
      float(bound),
      float(gap),
      self.ranked,
      [(chosen, words) for _, chosen, words in self.choices.infeasible],
      self.space,
      self.tried,
      self.simulated,
    )
