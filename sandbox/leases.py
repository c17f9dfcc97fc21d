"""Leases and the two-way sweep as pure functions. Called by `controller`.

Invariant: only a renewal or a command moves a deadline, and never to an earlier time than a running command needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from agentrl.core.types import SandboxState
from sandbox.states import Record

UNPLACED = frozenset({SandboxState.QUEUED, SandboxState.CREATING, SandboxState.CLOSING})
"""States in which the backend may or may not know the sandbox yet, or any more."""


def extended(record: Record, *, now: float) -> Record:
    """The lease after a command began or ended."""
    return replace(record, deadline=max(record.deadline, now + record.spec.ttl_s))


def held(record: Record, *, now: float, running_s: float) -> Record:
    """The lease while a command of at most `running_s` runs: so it also outlasts a controller's restart."""
    return replace(record, deadline=max(record.deadline, now + running_s + record.spec.ttl_s))


def renewed(record: Record, *, now: float, ttl_s: float) -> Record:
    """The lease after an explicit renewal, which may also shorten it."""
    return replace(record, deadline=now + ttl_s)


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a comparison of store and backend asks for."""

    expired: tuple[str, ...]
    """Leases that ended: to close."""
    lost: Mapping[str, str]
    """In the store, gone at the backend: id to cause."""
    orphans: tuple[str, ...]
    """At the backend, unknown or ended in the store: to destroy."""


def sweep(records: Iterable[Record], placed: Iterable[str], ended: Mapping[str, str], *, now: float) -> Sweep:
    """Compare the live records with what the backend has. `ended` gives causes that the backend knows."""
    live = {record.id: record for record in records}
    there = set(placed)
    expired = tuple(r.id for r in live.values() if r.deadline <= now and r.state not in UNPLACED)
    lost = {
        r.id: ended.get(r.id, "the backend does not know it any more")
        for r in live.values()
        if r.id not in there and r.state not in UNPLACED
    }
    return Sweep(expired=expired, lost=lost, orphans=tuple(there - live.keys()))
