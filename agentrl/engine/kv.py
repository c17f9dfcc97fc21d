"""The dense KV cache: who owns a row, what each row holds, and which prefix can be used again.

Used by the scheduler's thread alone. A row holds one sequence from position 0. Running rows lie in `[0, top)`, which
a decode step computes as one slice, without copying. A row in there that nobody runs is a hole: its result is thrown
away, and what it retains stays intact, since a step writes only at `valid`, where nothing counts yet.

Invariant: positions below `valid[r]` hold the keys and values of `tokens[r]` under the serving weights.
"""

from __future__ import annotations

import numpy as np
import torch

from agentrl.engine.sequence import Sequence

SLACK = 16
"""Tokens not worth a detour: retained ones that may be overwritten, or shared ones that may be computed twice."""
HOLES = 4
"""Holes may be up to 1/HOLES of the decode slice."""


class KVCache:
    def __init__(
        self, *, layers: int, heads: int, head_dim: int, rows: int, context: int, dtype: torch.dtype, device: str
    ) -> None:
        self.data = torch.zeros(layers, 2, rows, heads, context, head_dim, dtype=dtype, device=device)
        self.tokens = np.zeros((rows, context), dtype=np.int64)
        self.known = np.zeros(rows, dtype=np.int64)
        """Tokens in `tokens[r]`: those computed, and for running rows those still to compute."""
        self.valid = np.zeros(rows, dtype=np.int64)
        self.owner: list[Sequence | None] = [None] * rows
        self.top = 0
        """End of the decode slice."""
        self.queried = 0
        """Prompt tokens looked up since the start."""
        self.hits = 0
        """Those of them that were found."""
        self._salt = np.full(rows, None, dtype=object)
        """Of what a row retains or runs; None matches no call."""
        self._used = np.zeros(rows, dtype=np.int64)
        self._clock = 0
        self._running = 0

    @property
    def usage(self) -> float:
        """Share of the rows that run."""
        return self._running / len(self.owner)

    def admit(self, sequence: Sequence, tokens: np.ndarray, *, use_cache: bool) -> bool:
        """Give the sequence a row in the decode slice, with as much of its prefix as the cache holds.

        False, and nothing changed, when waiting a step would supply much more: a running row is computing it now.
        """
        source, shared, promised = self._match(tokens, sequence.salt) if use_cache else (-1, 0, 0)
        if promised - shared > SLACK:
            return False
        in_place = shared > 0 and self.owner[source] is None and self.valid[source] - shared <= SLACK
        if not in_place:
            oldest = self._oldest(source)
            if shared and oldest != source:
                self._copy(source, oldest, shared)
            source = oldest
        self.valid[source] = shared
        row = self._into_slice(source)
        self.tokens[row, : len(tokens)] = tokens
        self.known[row] = len(tokens)
        self._salt[row] = sequence.salt
        self.owner[row] = sequence
        sequence.row = row
        self._running += 1
        self.queried += len(tokens)
        self.hits += shared
        return True

    def release(self, sequence: Sequence) -> None:
        """The sequence ended; its row keeps what was computed until it is the oldest."""
        row = sequence.row
        self.owner[row] = None
        sequence.row = -1
        self.known[row] = self.valid[row]
        self._clock += 1
        self._used[row] = self._clock
        self._running -= 1

    def compact(self) -> None:
        """Shrink the decode slice: no hole at its end, and few inside."""
        self._trim()
        while (self.top - self._running) * HOLES > self.top:
            self._swap(self.top - 1, self.owner.index(None))
            self._trim()

    def clear(self) -> None:
        """Forget every key and value: the weights changed. Running rows keep their tokens and compute again."""
        self.valid[:] = 0
        for row, owner in enumerate(self.owner):
            if owner is None:
                self.known[row] = 0
                self._salt[row] = None

    def _match(self, tokens: np.ndarray, salt: str) -> tuple[int, int, int]:
        """The row with the longest common prefix that is computed, its length, and the longest that any row will have.

        At least one token stays to compute, so that there is something to sample from.
        """
        limit = len(tokens) - 1
        rows = np.flatnonzero(self._salt == salt)
        if limit == 0 or len(rows) == 0:
            return -1, 0, 0
        differs = self.tokens[rows, :limit] != tokens[:limit]
        same = np.where(differs.any(axis=1), differs.argmax(axis=1), limit)
        computed = np.minimum(same, self.valid[rows])
        best = int(computed.argmax())
        return int(rows[best]), int(computed[best]), int(np.minimum(same, self.known[rows]).max())

    def _oldest(self, source: int) -> int:
        """The free row that was used least recently; `source` only when there is no other."""
        free = [row for row, owner in enumerate(self.owner) if owner is None]
        return min(free, key=lambda row: (row == source, self.valid[row] > 0, self._used[row]))

    def _into_slice(self, row: int) -> int:
        """Move a free row's contents into the decode slice, by exchange with a hole or with the row after it."""
        if row < self.top:
            return row
        if self._running < self.top:
            place = self.owner.index(None)
        else:
            place = self.top
            self.top += 1
        self._swap(row, place)
        return place

    def _trim(self) -> None:
        while self.top and self.owner[self.top - 1] is None:
            self.top -= 1

    def _copy(self, source: int, target: int, length: int) -> None:
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]
        self.tokens[target, :length] = self.tokens[source, :length]

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        kept = self.data[:, :, a, :, : int(self.valid[a])].clone()
        moved = int(self.valid[b])
        self.data[:, :, a, :, :moved] = self.data[:, :, b, :, :moved]
        self.data[:, :, b, :, : kept.shape[-2]] = kept
        for column in (self.tokens, self.known, self.valid, self._salt, self._used):
            column[[a, b]] = column[[b, a]]
        self.owner[a], self.owner[b] = self.owner[b], self.owner[a]
        for row in (a, b):
            owner = self.owner[row]
            if owner is not None:
                owner.row = row
