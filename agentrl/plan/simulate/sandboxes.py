"""Sandboxes of a simulation: how many are in use at each moment, and queues for a limited number of them."""

from __future__ import annotations

import numpy as np

from agentrl.plan.simulate.draws import Floats, Ints


class Timeline:
    """How many things exist over time, in bins."""

    def __init__(self, bin_s: float) -> None:
        self.bin_s = bin_s
        self._changes = np.zeros(1024, dtype=np.int64)
        self._used = 0
        self._area = 0.0
        self._count = 0

    def add(self, times: Floats, change: int) -> None:
        """`change` (+1 or -1) at each of the times."""
        if not times.size:
            return
        bins = (times / self.bin_s).astype(np.int64)
        self._used = max(self._used, int(bins.max()) + 1)
        while self._used > len(self._changes):
            self._changes = np.concatenate([self._changes, np.zeros_like(self._changes)])
        np.add.at(self._changes, bins, change)
        self._area -= change * float(times.sum())
        self._count += change * len(times)

    def series(self) -> Ints:
        """The number at the end of each bin."""
        return np.cumsum(self._changes[: self._used])

    def mean(self, until: float) -> float:
        """Over [0, until], of everything that began by then."""
        return (self._area + self._count * until) / until if until else 0.0


class Pools:
    """A pool of sandboxes at each replica, first come first served. Calls must come in the order of time."""

    def __init__(self, rows: int, size: int) -> None:
        self._free_at = np.zeros((rows, size))
        self.waited_s = 0.0
        self.served = 0

    def begin(self, rows: Ints, at: Floats, seconds: Floats) -> Floats:
        """When an execution that arrives at `at` gets a sandbox; it keeps it for `seconds`."""
        columns = self._free_at[rows].argmin(axis=1)
        begins: Floats = np.maximum(at, self._free_at[rows, columns])
        self._free_at[rows, columns] = begins + seconds
        self.waited_s += float((begins - at).sum())
        self.served += len(rows)
        return begins
