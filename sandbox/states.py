"""The life of a sandbox as a pure state machine. Used by `controller`, `store` and `leases`.

    QUEUED -> CREATING -> READY <-> PAUSED -> CLOSING -> CLOSED
    any live state -> FAILED | LOST(cause)

Invariant: a terminal state never changes, and carries its evidence in `cause`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agentrl.core.errors import Conflict
from agentrl.core.types import SandboxSpec, SandboxState, SandboxView

S = SandboxState
TERMINAL = frozenset({S.CLOSED, S.FAILED, S.LOST})
NEXT: dict[SandboxState, frozenset[SandboxState]] = {
    S.QUEUED: frozenset({S.CREATING, S.CLOSING, S.FAILED, S.LOST}),
    S.CREATING: frozenset({S.READY, S.CLOSING, S.FAILED, S.LOST}),
    S.READY: frozenset({S.PAUSED, S.CLOSING, S.FAILED, S.LOST}),
    S.PAUSED: frozenset({S.READY, S.CLOSING, S.FAILED, S.LOST}),
    S.CLOSING: frozenset({S.CLOSED, S.FAILED, S.LOST}),
    S.CLOSED: frozenset(),
    S.FAILED: frozenset(),
    S.LOST: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Record:
    """Everything that is known about one sandbox."""

    id: str
    owner: str
    key: str
    """Idempotency key of its creation; unique for an owner."""
    digest: str
    """SHA-256 of the creating request: a replay must match it. Empty when it was closed before it was created."""
    spec: SandboxSpec
    state: SandboxState
    created_at: float
    deadline: float
    ended_at: float = 0.0
    """Unix seconds; 0 while it lives."""
    cause: str = ""
    calls: Mapping[str, str] = field(default_factory=dict)
    """What was asked of it with a key and changed its state, newest last: key to request."""

    @property
    def live(self) -> bool:
        return self.state not in TERMINAL

    def view(self) -> SandboxView:
        return SandboxView.model_construct(
            id=self.id, state=self.state, spec=self.spec, owner=self.owner,
            created_at=self.created_at, deadline=self.deadline, cause=self.cause,
        )  # fmt: skip


def advance(record: Record, state: SandboxState, *, now: float, cause: str = "") -> Record:
    """The record in its next state. Conflict when that is not a step of the machine."""
    if state not in NEXT[record.state]:
        raise Conflict(f"sandbox {record.id} is {record.state} and cannot become {state}")
    ended = now if state in TERMINAL else 0.0
    return replace(record, state=state, ended_at=ended, cause=cause or record.cause)
