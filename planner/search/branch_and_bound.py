"""Sets of plans that differ in the sizes of their places, to be halved."""

import numpy as np

BATCH = 1024  # Sets that are halved at once.


class Sets:
  """Sets of plans of one number of pieces: sizes of places within limits."""

  def __init__(self, choices, cut):
    self.choices, self.cut = choices, cut
    table = choices.table(cut)
    which = {}
    for blocks in choices.blocks:
      for block in blocks:
        which.setdefault(block, len(which))
    # Of each set of groups on at most so many units, and none for no place.
    self.busy = np.zeros((len(which) + 1, choices.units + 1))
    for block, number in which.items():
      here = np.array([block >> int(g) & 1 for g in cut.group], bool)
      self.busy[number] = np.max(
        [
          np.minimum.accumulate(table[here & (cut.floor.outside == who)].sum(0))
          for who in range(cut.floor.outside.max() + 1)
        ],
        axis=0,
      )
    # The largest size that there is a mesh for, up to so many units.
    self.nearest = np.zeros(self.busy.shape, int)
    for block, number in which.items():
      sizes = [
        n * bool(choices.menu(block, n)) for n in range(1, table.shape[1])
      ]
      self.nearest[number, 1:] = np.maximum.accumulate(sizes)
    self.block = np.full((len(choices.blocks), choices.space.places), -1)
    for p, blocks in enumerate(choices.blocks):
      self.block[p, : len(blocks)] = [which[block] for block in blocks]
    # [level, node, units]: the least over 2 ** level sizes from there on.
    levels = [table]
    while 2 ** len(levels) <= table.shape[1]:
      shift = 2 ** (len(levels) - 1)
      later = np.full_like(table, np.inf)
      later[:, :-shift] = levels[-1][:, shift:]
      levels.append(np.minimum(levels[-1], later))
    self.levels = np.stack(levels)
    self.part = np.zeros(0, int)
    self.low = self.high = np.zeros((0, choices.space.places), int)
    self.bounds = np.zeros(0)
    self.luck = np.random.default_rng(0)

  @property
  def least(self) -> float:
    return self.bounds.min(initial=np.inf)

  def seconds(self, part, low, high):
    """The least seconds of every node, and where it is, both [N, K]."""
    at = self.choices.place_of[part][:, self.cut.group].T
    which = np.arange(len(part))
    low, high = low[which, at], high[which, at]
    level = np.log2(high - low + 1).astype(int)
    nodes = np.arange(len(at))[:, None]
    one = self.levels[level, nodes, low]
    return np.minimum(one, self.levels[level, nodes, high - 2**level + 1]), at

  def add(self, part, low, high, search):
    """Adds sets that may hold a faster plan than the best so far."""
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
    bounds = self._share_out(part, low, bounds, search.enough)
    some = bounds < search.enough
    self.part = np.concatenate([self.part, part[some]])
    self.low = np.concatenate([self.low, low[some]])
    self.high = np.concatenate([self.high, high[some]])
    self.bounds = np.concatenate([self.bounds, bounds[some]])

  def _need(self, part, seconds):
    """The least sizes with which no place is busy for longer, [K, places]."""
    block = self.block[part]
    some, all_ = np.zeros((2, *block.shape), int)
    all_ += np.where(block < 0, 0, self.choices.units)
    while (some < all_).any():
      middle = (some + all_) // 2
      enough = self.busy[block, middle] <= seconds[:, None]
      all_ = np.where(enough, middle, all_)
      some = np.where(enough, some, np.minimum(middle + 1, all_))
    return all_

  def _share_out(self, part, low, bounds, enough):
    """Bounds, if devices are shared out so that no place is busy for long."""
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
      # The last size may still be too slow: then nothing fits at all.
      roof, bounds = (
        np.where(fits, middle, roof),
        np.where(fits, bounds, middle),
      )
    return bounds

  def take(self, search):
    """Takes out the sets of least bounds; those that cannot matter go."""
    keep = np.flatnonzero(self.bounds < search.enough)
    order = keep
    if len(keep) > BATCH:
      order = keep[np.argpartition(self.bounds[keep], BATCH)]
    first, rest = order[:BATCH], order[BATCH:]
    taken = self.part[first], self.low[first], self.high[first]
    self.part, self.low, self.high = (
      x[rest] for x in (self.part, self.low, self.high)
    )
    self.bounds = self.bounds[rest]
    return taken

  def halve(self, search):
    """Halves some sets; returns those of one size of every place."""
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
    """Plans of the sets of least bounds that share devices out by work."""
    first = np.argsort(self.bounds, kind='stable')[: BATCH // 4]
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
    work = work * np.exp(0.3 * self.luck.standard_normal(work.shape))
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
    """Narrows limits, in place, to sizes that fit; False where none does."""
    for b in range(len(self.choices.blocks[part])):
      fits = lambda n: self.choices.possible(self.cut, part, b, int(n))
      while low[b] <= high[b] and not fits(low[b]):
        low[b] += 1
      while low[b] <= high[b] and not fits(high[b]):
        high[b] -= 1
      if low[b] > high[b]:
        return False
    return low.sum() <= self.choices.units
