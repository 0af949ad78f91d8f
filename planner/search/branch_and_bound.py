"""Sets of plans that differ in the sizes of their places, to be split."""

import numpy as np

# Sets that are split at once. With more, a call of NumPy bounds more of them,
# but more are split that a plan found meanwhile would have excluded.
BATCH = 256
GUESSED = 64  # Sets that plans are guessed from.


class PlanSets:
  """Sets of plans with one number of pieces.

  A set is a partition with limits on the sizes of its places.

  Attributes:
    part: the partition of each set, [K].
    low: the smallest size of each place, [K, places], 0 for no place.
    high: the largest size, likewise.
    bounds: lower bounds on the seconds of a step, [K].
  """

  def __init__(self, choices, cut):
    self.choices, self.cut = choices, cut
    table = choices.table(cut)
    which = {}
    for blocks in choices.blocks:
      for block in blocks:
        which.setdefault(block, len(which))
    # Least busy seconds of each block by its units; the last row is no place.
    self.busy = np.zeros((len(which) + 1, choices.units + 1))
    for block, number in which.items():
      here = np.array([block >> int(g) & 1 for g in cut.group], bool)
      self.busy[number] = np.max(
        [
          np.minimum.accumulate(
            table[here & (cut.bounds.outside == who)].sum(0)
          )
          for who in range(cut.bounds.outside.max() + 1)
        ],
        axis=0,
      )
    # The largest size with a mesh, up to so many units.
    self.nearest = np.zeros(self.busy.shape, int)
    for block, number in which.items():
      sizes = [
        n * bool(choices.menu(block, n)) for n in range(1, table.shape[1])
      ]
      self.nearest[number, 1:] = np.maximum.accumulate(sizes)
    self.block = np.full((len(choices.blocks), choices.space.max_places), -1)
    for p, blocks in enumerate(choices.blocks):
      self.block[p, : len(blocks)] = [which[block] for block in blocks]
    # [level, node, units]: the minimum over 2 ** level sizes from there on.
    levels = [table]
    while 2 ** len(levels) <= table.shape[1]:
      shift = 2 ** (len(levels) - 1)
      later = np.full_like(table, np.inf)
      later[:, :-shift] = levels[-1][:, shift:]
      levels.append(np.minimum(levels[-1], later))
    self.levels = np.stack(levels)
    self.part = np.zeros(0, int)
    self.low = self.high = np.zeros((0, choices.space.max_places), int)
    self.bounds = np.zeros(0)
    self.rng = np.random.default_rng(0)

  @property
  def least(self) -> float:
    return self.bounds.min(initial=np.inf)

  def seconds(self, part, low, high):
    """Returns the least seconds and the place of every node, both [N, K]."""
    at = self.choices.place_of[part][:, self.cut.group].T
    which = np.arange(len(part))
    low, high = low[which, at], high[which, at]
    level = np.log2(high - low + 1).astype(int)
    nodes = np.arange(len(at))[:, None]
    one = self.levels[level, nodes, low]
    return np.minimum(one, self.levels[level, nodes, high - 2**level + 1]), at

  def add(self, part, low, high, search):
    """Adds the sets that may contain a faster plan than the best so far."""
    low = np.maximum(low, self._need(part, np.full(len(part), search.enough)))
    others = low.sum(1, keepdims=True) - low
    high = np.minimum(high, self.choices.units - others)
    some = (high >= low).all(1)
    part, low, high = part[some], low[some], high[some]
    if not len(part):
      return
    bounds = search.bound(self, *self.seconds(part, low, high))
    some = bounds < search.enough
    part, low, high, bounds = (x[some] for x in (part, low, high, bounds))
    bounds = self._raise_bounds(part, low, bounds, search.enough)
    some = bounds < search.enough
    self.part = np.concatenate([self.part, part[some]])
    self.low = np.concatenate([self.low, low[some]])
    self.high = np.concatenate([self.high, high[some]])
    self.bounds = np.concatenate([self.bounds, bounds[some]])

  def _need(self, part, seconds):
    """Returns the least sizes with which no place is busy for longer.

    The result is [K, places], found by bisection.
    """
    block = self.block[part]
    least, most = np.zeros((2, *block.shape), int)
    most += np.where(block < 0, 0, self.choices.units)
    while (least < most).any():
      middle = (least + most) // 2
      enough = self.busy[block, middle] <= seconds[:, None]
      most = np.where(enough, middle, most)
      least = np.where(enough, least, np.minimum(middle + 1, most))
    return most

  def _raise_bounds(self, part, low, bounds, enough):
    """Raises bounds by how the places of a plan compete for devices.

    If the devices do not suffice to keep every place busy for at most t
    seconds, a step takes longer than t. The largest such t is found by
    bisection.
    """
    if not len(part):
      return bounds
    roof = np.full(len(part), enough)
    if enough == np.inf:
      roof = self.busy[self.block[part], low].max(1)
    roof = np.maximum(roof, bounds)
    for _ in range(12):
      middle = (bounds + roof) / 2
      need = np.maximum(low, self._need(part, middle)).sum(1)
      fits = need <= self.choices.units
      # Even the largest size may be too slow, and then nothing fits.
      roof, bounds = (
        np.where(fits, middle, roof),
        np.where(fits, bounds, middle),
      )
    return bounds

  def take(self, search):
    """Removes and returns the sets of least bounds; drops hopeless ones.

    Of sets with equal bounds, the newest come first. They are the smallest, so
    plans are reached sooner. Without a rule, the order would be that of a sort,
    which differs between processors, and with it the number of bounds.
    """
    keep = np.flatnonzero(self.bounds < search.enough)
    order = keep[np.lexsort((-keep, self.bounds[keep]))]
    first, rest = order[:BATCH], np.sort(order[BATCH:])
    taken = self.part[first], self.low[first], self.high[first]
    self.part, self.low, self.high = (
      x[rest] for x in (self.part, self.low, self.high)
    )
    self.bounds = self.bounds[rest]
    return taken

  def split(self, search):
    """Splits the sets of least bounds in two.

    Returns the sets in which every place has a single size, as plans.
    """
    leaves, halves = [], []
    for part, low, high in zip(*self.take(search), strict=True):
      part = int(part)
      if not self._trim(part, low, high):
        continue
      n = len(self.choices.blocks[part])
      if (low == high).all():
        leaves.append((part, tuple(low[:n].tolist())))
        continue
      b = int(np.argmax(high[:n] / low[:n]))
      middle = int((low[b] * high[b]) ** 0.5)
      for x, y in ((low[b], middle), (middle + 1, high[b])):
        one, other = low.copy(), high.copy()
        one[b], other[b] = x, y
        halves.append((part, one, other))
    if halves:
      self.add(*map(np.array, zip(*halves, strict=True)), search)
    return leaves

  def guess(self, search):
    """Guesses plans that divide the devices in proportion to the work.

    They come from the sets of least bounds; a good guess lowers `search.best`
    early.
    """
    first = np.argsort(self.bounds, kind='stable')[:GUESSED]
    part, low, high = self.part[first], self.low[first], self.high[first]
    if not len(part):
      return []
    part, low, high = (np.repeat(x, 4, 0) for x in (part, low, high))
    work, at = self.seconds(part, low, high)
    all_work = self.levels[0][:, -1:]
    work = np.where(np.isfinite(all_work), all_work, work)
    work = np.stack(
      [np.where(at == b, work, 0).sum(0) for b in range(low.shape[1])], 1
    )
    work = work * np.exp(0.3 * self.rng.standard_normal(work.shape))
    left = self.choices.units - low.sum(1, keepdims=True)
    shares = work / np.maximum(work.sum(1, keepdims=True), 1e-300)
    size = np.floor(shares * self.choices.units).astype(int) - low
    size = np.maximum(size, 0)
    over = np.maximum(size.sum(1, keepdims=True), 1)
    size = low + np.where(over > left, size * left // over, size)
    size = np.minimum(size, high)
    size = np.maximum(self.nearest[self.block[part], size], low)
    bounds = search.bound(self, *self.seconds(part, size, size))
    best = np.argsort(bounds, kind='stable')[:2]
    return [
      (
        int(part[k]),
        tuple(size[k][: len(self.choices.blocks[part[k]])].tolist()),
      )
      for k in best
      if bounds[k] < search.enough
    ]

  def _trim(self, part, low, high) -> bool:
    """Narrows limits in place to sizes that fit; False if none does."""
    for b in range(len(self.choices.blocks[part])):
      fits = lambda n: self.choices.possible(self.cut, part, b, int(n))
      while low[b] <= high[b] and not fits(low[b]):
        low[b] += 1
      while low[b] <= high[b] and not fits(high[b]):
        high[b] -= 1
      if low[b] > high[b]:
        return False
    return low.sum() <= self.choices.units
