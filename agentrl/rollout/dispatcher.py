"""Decides what to run next and what becomes of each group. Driven by the producer; owns no task and no client.

Calls and answers: `observe` the ledger, ask `wants_group`, `admit` or `restore` groups, ask `next` for a slot
to run, tell how it `ended`. Invariant: a slot is pending, running or ended, never two of them; a group ends
exactly once, when all its slots have; nothing is issued beyond the concurrency or the staleness limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from agentrl.core.config import RolloutConfig
from agentrl.rollout.staleness import Ledger, Staleness
from agentrl.rollout.tables import DropReason


class Result(Enum):
    """What an ended episode means for its slot."""

    SCORED = auto()
    UNSCORED = auto()
    """The policy caused a failure that the environment does not price: final, and outside the group's statistics."""
    LOST = auto()
    """Nothing can be said of the attempt (infra failure or quarantine): issue it again while tries are left."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One of a group's attempts."""

    group_id: str
    index: int


@dataclass(frozen=True, slots=True)
class Ended:
    result: Result
    reward: float | None = None
    """Set when SCORED."""


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """A group all of whose slots have ended: ready, or dropped for `reason`."""

    group_id: str
    reason: DropReason | None


@dataclass(slots=True)
class _Open:
    """A running group."""

    size: int
    tries: dict[int, int]
    ended: dict[int, Ended] = field(default_factory=dict)


class Dispatcher:
    """The state machine of issue, re-issue and group completion."""

    def __init__(self, config: RolloutConfig, *, steps: int) -> None:
        self._config = config
        self._steps = steps
        self._staleness = Staleness.of(config)
        self._ledger = Ledger(version=-1, ready=0, consumed=0, flat=0, steps=0, taken=0, served=-1)
        self._open: dict[str, _Open] = {}
        self._pending: deque[Slot] = deque()
        self._running: set[Slot] = set()

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def running(self) -> int:
        """Episodes in flight."""
        return len(self._running)

    @property
    def open_groups(self) -> int:
        return len(self._open)

    @property
    def room(self) -> int:
        """Groups that staleness lets in now, and that a step is left for."""
        left = (self._steps - self._ledger.taken) * self._config.groups - self._ledger.ready - len(self._open)
        return max(0, min(left, self._staleness.room(self._ledger, len(self._open))))

    def observe(self, ledger: Ledger) -> None:
        """Take over a reading of the store that is newer than every group end told so far."""
        self._ledger = ledger

    def wants_group(self) -> bool:
        """Whether a new group may be issued now."""
        idle = self._config.concurrency - len(self._running) - len(self._pending)
        return idle > 0 and self.room > 0

    def admit(self, group_id: str) -> None:
        self.restore(group_id, [None] * self._config.group_size, [0] * self._config.group_size)

    def restore(self, group_id: str, slots: Sequence[Ended | None], tries: Sequence[int]) -> None:
        """Take in a group of which some slots may have ended; the others are queued.

        `tries` are the lost attempts of each slot that count against `reissues`. When every slot has ended,
        `complete` tells what becomes of the group.
        """
        if group_id in self._open:
            raise ValueError(f"group {group_id} is already open")
        ended = {index: end for index, end in enumerate(slots) if end is not None}
        self._open[group_id] = _Open(size=len(slots), tries=dict(enumerate(tries)), ended=ended)
        self._pending.extend(Slot(group_id, index) for index in range(len(slots)) if index not in ended)

    def complete(self, group_id: str) -> GroupEnd | None:
        """Close the group if all its slots have ended."""
        group = self._open[group_id]
        if len(group.ended) < group.size:
            return None
        reason = self._reason(group)
        del self._open[group_id]
        if reason is None:
            self._ledger = replace(self._ledger, ready=self._ledger.ready + 1)
        elif reason is DropReason.FLAT:
            self._ledger = replace(self._ledger, flat=self._ledger.flat + 1)
        return GroupEnd(group_id, reason)

    def next(self) -> Slot | None:
        """The next slot to run, oldest group first; None when nothing is pending or all places are taken."""
        if not self._pending or len(self._running) >= self._config.concurrency:
            return None
        slot = self._pending.popleft()
        self._running.add(slot)
        return slot

    def ended(self, slot: Slot, end: Ended) -> bool:
        """Note how a running slot ended. True: it is lost and pending again under a new episode."""
        self._running.remove(slot)
        group = self._open[slot.group_id]
        if end.result is Result.LOST and group.tries[slot.index] < self._config.reissues:
            group.tries[slot.index] += 1
            # First in the queue: an old group must not age behind new ones.
            self._pending.appendleft(slot)
            return True
        group.ended[slot.index] = end
        return False

    def waiting_for(self) -> str:
        """What has to happen for anything to move; for the status page and NO_PROGRESS."""
        if self._ledger.version < 0:
            return "the trainer's first policy version"
        if self._running:
            return f"{len(self._running)} running episodes of {len(self._open)} groups"
        counted = f"{self._ledger.ready} groups ready, {self._ledger.consumed} taken at version {self._ledger.version}"
        return f"the trainer to take a step or publish a version ({counted})"

    def _reason(self, group: _Open) -> DropReason | None:
        rewards = [end.reward for end in group.ended.values() if end.result is Result.SCORED]
        if len(rewards) < self._config.min_scored:
            return DropReason.TOO_FEW_SCORED
        budget = self._config.flat_limit * self._config.groups
        flat = len(set(rewards)) == 1
        return DropReason.FLAT if flat and self._config.resample_flat and self._ledger.flat < budget else None
