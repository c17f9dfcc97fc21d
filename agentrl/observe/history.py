"""The numbers that a run wrote down, step by step. Read by the live view, the report and `agentrl runs`.

Invariant: one row a step; where a resumed run took a step again, the later row is the true one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Row = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class History:
    rows: tuple[Row, ...]
    """In the order of `step`; each with `step`, `time` and the metrics that were finite."""

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of one metric."""
        found = [(row["step"], row[name]) for row in self.rows if name in row]
        return [step for step, _ in found], [value for _, value in found]

    def values(self, name: str) -> list[float]:
        return self.series(name)[1]


def mismatch(row: Row) -> float | None:
    """The step's mean |trainer - engine| logprob at zero lag: on the batch or on the probe, whichever is larger."""
    found = [row[name] for name in ("train/mismatch_zero_lag_mean_abs", "weights/mismatch_mean_abs") if name in row]
    return max(found, default=None)


class Tail:
    """Follows a file of JSON lines: each `read` returns the objects that were completed since the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> list[dict[str, object]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def numbers(row: Mapping[str, object]) -> Row:
    """The row without the values that were not finite."""
    return {name: float(value) for name, value in row.items() if isinstance(value, int | float)}


def read_history(path: Path) -> History:
    """A metrics file; empty when the run has not written one yet."""
    by_step = {row["step"]: row for row in map(numbers, Tail(path).read())}
    return History(tuple(by_step[step] for step in sorted(by_step)))
