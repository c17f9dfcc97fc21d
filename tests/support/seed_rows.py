"""Rows of the tables that check `agentrl.plan` against published worked examples. Read by `test_seeds`.

Invariant: a row computes through the room's public functions; its arithmetic is nowhere in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentrl.plan.figure import Figure


@dataclass(frozen=True)
class Row:
    """A number that the room reproduces."""

    where: str
    """Document, part and question, then which number."""
    printed: float
    """In base units: seconds, bytes, FLOP, shares."""
    compute: Callable[[], float | Figure]
    relative: float = 0.02
    rounded_to: float | None = None
    """The last digit printed stands for this much; then half of it is the tolerance, if that is more."""

    def problem(self) -> str | None:
        """What is wrong, or None."""
        found = self.compute()
        value = found.value if isinstance(found, Figure) else found
        # A number printed as x5 is often one that lay at the half itself, so the half is inclusive.
        allowed = max(self.relative * abs(self.printed), (self.rounded_to or 0.0) / 2 * (1 + 1e-9))
        if abs(value - self.printed) <= allowed:
            return None
        return f"{self.where}: printed {self.printed:g}, computed {value:g}, allowed difference {allowed:g}"


@dataclass(frozen=True)
class Unreproduced:
    """A number that does not follow from what its document says."""

    where: str
    printed: str
    reason: str
    measured: bool = False
    """Nothing to compute: somebody measured it. Otherwise the document contradicts itself or omits inputs."""
