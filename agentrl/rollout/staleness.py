"""How far behind the trainer a sample may be, and how many groups may therefore be outstanding.

Called by the dispatcher (pacing) and by the buffer (the sweep). Pure. Invariant: while at most
`(limit + 1) x B` groups are charged and the trainer consumes B oldest groups a version, every group is
consumed within `limit` versions of its issue; the sweep enforces what stragglers and restarts break.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from agentrl.core.config import RolloutConfig


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the store says that admission must count."""

    version: int
    """The newest policy version that replicas serve, -1 before the first."""
    ready: int
    """Groups that wait for the trainer."""
    consumed: int
    """Groups that the trainer took at `version` or later: their step has no published version yet."""
    flat: int
    """Groups dropped as flat since `version` was published."""
    steps: int
    """Committed training steps."""
    taken: int
    """Training steps that have taken their groups, committed or not."""
    served: int
    """Training steps that the policy of `version` has had, -1 before the first."""


@dataclass(frozen=True, slots=True)
class Staleness:
    """The lag limit of a form, in policy versions."""

    limit: int
    groups: int
    """B, the groups of one step."""
    paced: bool
    """False: issue as fast as concurrency allows and let the sweep drop what gets too old."""

    @classmethod
    def of(cls, config: RolloutConfig) -> Self:
        paced = config.at_limit == "wait" or config.form != "async"
        return cls(limit=config.lag_limit, groups=config.groups, paced=paced)

    def room(self, ledger: Ledger, running: int) -> int:
        """Groups that may be issued now, given the groups that are running.

        This is (limit + v + 1) B - (accepted + running) with the v B groups of past versions taken off
        both sides, which needs no rebasing after a resume and frees the room of groups that were dropped.
        """
        if ledger.version < 0:
            return 0
        if not self.paced:
            return self.groups
        return max(0, (self.limit + 1) * self.groups - (running + ledger.ready + ledger.consumed))
