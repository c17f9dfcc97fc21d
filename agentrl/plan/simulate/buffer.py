"""Finished trajectories between generation and the trainer. Used by `batches` and `stream`.

Invariant: the trainer gets whole groups, in the order in which they became whole, after those that it says are due.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agentrl.plan.simulate.draws import Floats, Ints
from agentrl.plan.simulate.parameters import Parameters
from agentrl.plan.simulate.replicas import ROW, Rows


@dataclass(frozen=True, slots=True)
class Batch:
    rows: Rows
    """What is trained on."""
    stale: Rows
    """Members of the same groups that are too old."""
    whole_at: float
    """Seconds when the last of its groups became whole."""


class Buffer:
    def __init__(self, parameters: Parameters) -> None:
        self._replicas = parameters.replicas
        self._group_size = parameters.group_size
        self._rows: Rows = np.empty(0, dtype=ROW)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Rows) -> None:
        self._rows = np.concatenate([self._rows, rows])

    def begun_before(self, version: int) -> int:
        """Trajectories whose first token older weights sampled."""
        return int((self._rows["version"] < version).sum())

    def clear(self) -> Rows:
        """Empty the buffer; returns what was in it."""
        rows, self._rows = self._rows, np.empty(0, dtype=ROW)
        return rows

    def oldest_unwhole(self) -> int | None:
        """The oldest first version among members of groups that are not whole."""
        _, whole_at, oldest = self._by_group()
        missing = np.isinf(whole_at)
        return int(oldest[missing].min()) if missing.any() else None

    def take(self, count: int, fresh_from: int | None = None, due_until: int | None = None) -> Batch | None:
        """At least `count` trajectories of whole groups that began at version `fresh_from` or later.

        Groups with one that began at `due_until` or earlier come first. None, and nothing is taken, while there are
        too few.
        """
        if len(self._rows) < count:
            return None
        groups, whole_at, oldest = self._by_group()
        later = np.zeros(len(groups)) if due_until is None else oldest > due_until
        order = np.lexsort((groups, whole_at, later))
        order = order[np.isfinite(whole_at[order])]
        fresh = np.ones(len(order), dtype=bool)
        if fresh_from is not None:
            fresh = self._rows["version"][order] >= fresh_from
        total = np.cumsum(fresh)
        if not len(total) or total[-1] < count:
            return None
        last = int(np.searchsorted(total, count))
        # A group that lost stale members may straddle the count; it is taken whole.
        while last + 1 < len(order) and groups[order[last + 1]] == groups[order[last]]:
            last += 1
        chosen = order[: last + 1]
        kept, rows = fresh[: len(chosen)], self._rows[chosen]
        batch = Batch(rows[kept], rows[~kept], float(whole_at[chosen].max()))
        self._rows = np.delete(self._rows, chosen)
        return batch

    def _by_group(self) -> tuple[Ints, Floats, Ints]:
        """For each row: its group, when that became whole (infinite while members are missing), its oldest version."""
        ids, times, versions = self._rows["id"], self._rows["time"], self._rows["version"]
        if self._group_size == 1:
            return ids, times, versions
        groups = ids // self._replicas // self._group_size * self._replicas + ids % self._replicas
        _, group, counts = np.unique(groups, return_inverse=True, return_counts=True)
        latest, oldest = np.zeros(len(counts)), np.full(len(counts), np.iinfo(np.int64).max)
        np.maximum.at(latest, group, times)
        np.minimum.at(oldest, group, versions)
        latest[counts < self._group_size] = np.inf
        return groups, latest[group], oldest[group]
