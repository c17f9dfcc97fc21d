"""Snapshots: the files of a sandbox, kept for a time, to create others from. Used by `controller`.

Invariants: a sandbox and a key make one snapshot, ever; what the backend keeps has a row that leads to its end.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from weakref import WeakValueDictionary

from agentrl.core.errors import AgentRLError, Conflict, NotFound
from agentrl.core.telemetry import Metrics
from agentrl.core.types import SandboxSpec, SandboxState, Snapshot
from sandbox import leases
from sandbox.admission import tenant_of
from sandbox.backends.base import Backend
from sandbox.records import Records
from sandbox.snapshot_store import SnapshotRow, SnapshotState, SnapshotStore
from sandbox.verbs import Verbs

log = logging.getLogger(__name__)

COMPARE_S = 60.0
"""How often the backend is asked for what it keeps."""


class Snapshots:
    def __init__(
        self,
        backend: Backend,
        store: SnapshotStore,
        records: Records,
        verbs: Verbs,
        *,
        metrics: Metrics,
        retention_s: float,
        leads: Callable[[], bool],
    ) -> None:
        self._leads = leads
        self._backend, self._store, self._records, self._verbs = backend, store, records, verbs
        self._metrics, self._retention_s = metrics, retention_s
        self._rows: dict[str, SnapshotRow] = {}
        self._compare_at = 0.0
        """When (monotonic) to look next for what the store does not know."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held by whoever makes or forgets one."""

    async def load(self) -> None:
        self._rows = {row.id: row for row in await self._store.all()}
        self._count()

    async def release(self, there: frozenset[str]) -> None:
        """Of the sandboxes at the backend, let those go on that a controller left frozen, killed amid a snapshot."""
        for row in self._rows.values():
            record = self._records.live.get(row.sandbox) if row.sandbox in there else None
            if row.state is SnapshotState.MAKING and record is not None and record.state is SandboxState.READY:
                try:
                    await self._backend.resume(row.sandbox)
                except AgentRLError as error:
                    log.warning("sandbox %s may still be frozen: %s", row.sandbox, error.message)

    async def make(self, sandbox_id: str, key: str, ttl_s: float) -> Snapshot:
        """Keep the files of a sandbox that is READY or PAUSED, for `ttl_s`; durable on return."""
        snapshot_id = "snap-" + hashlib.sha256(f"{sandbox_id} {key}".encode()).hexdigest()[:16]
        digest = f"ttl_s {ttl_s}"
        if snapshot_id not in self._rows and (await self._records.get(sandbox_id)).state is SandboxState.CLOSING:
            # Told at once, not when it has ended.
            await self._records.ready(sandbox_id)
        async with self._verbs.turn(sandbox_id), self._lock(snapshot_id):
            known = self._rows.get(snapshot_id)
            if known is not None and known.state is not SnapshotState.MAKING:
                return self._replayed(known, key, digest)
            record = await self._records.get(sandbox_id)
            if record.state is not SandboxState.PAUSED:
                record = await self._records.ready(sandbox_id)
            now = self._records.clock.now()
            row = SnapshotRow(snapshot_id, record.owner, sandbox_id, digest, SnapshotState.MAKING, now, now + ttl_s)
            if known is not None:
                await self._undo(known)
            await self._make(row)
            row = self._rows[snapshot_id]
        self._extend(sandbox_id)
        return row.view()

    def _lock(self, snapshot_id: str) -> asyncio.Lock:
        lock = self._locks.get(snapshot_id)
        if lock is None:
            lock = self._locks[snapshot_id] = asyncio.Lock()
        return lock

    def _replayed(self, row: SnapshotRow, key: str, digest: str) -> Snapshot:
        if row.digest != digest:
            raise Conflict(f"key {key!r} made snapshot {row.id} from another request: take a fresh key")
        if row.state is SnapshotState.ENDED:
            raise NotFound(f"key {key!r} made snapshot {row.id}, which was forgotten: take a fresh key")
        return row.view()

    async def _make(self, row: SnapshotRow) -> None:
        self._rows[row.id] = row
        try:
            await self._store.add(row)
            await self._backend.snapshot(row.sandbox, row.id)
            await self._put(replace(self._rows[row.id], state=SnapshotState.READY))
        except BaseException:
            # What cannot be undone now, the sweep undoes.
            with suppress(AgentRLError):
                await self._undo(row)
            raise

    def _extend(self, sandbox_id: str) -> None:
        record = self._records.live.get(sandbox_id)
        if record is not None:
            self._records.put(leases.extended(record, now=self._records.clock.now()))

    async def _undo(self, row: SnapshotRow) -> None:
        """There is no trace of it afterwards: its key is free."""
        await self._backend.forget_snapshot(row.id)
        await self._store.remove(row.id)
        self._rows.pop(row.id, None)
        self._count()

    def check(self, spec: SandboxSpec, owner: str) -> None:
        """NotFound when the spec names a snapshot that `owner` cannot begin from."""
        if not spec.snapshot:
            return
        row = self._rows.get(spec.snapshot)
        if row is None or row.state is not SnapshotState.READY or tenant_of(row.owner) != tenant_of(owner):
            raise NotFound(
                f"no snapshot {spec.snapshot} of {tenant_of(owner)}: it never was, or its time ended; nothing was made"
            )

    def list(self, owner: str | None) -> Sequence[Snapshot]:
        rows = (row for row in self._rows.values() if row.state is SnapshotState.READY)
        return [row.view() for row in rows if owner is None or row.owner == owner]

    async def forget(self, snapshot_id: str) -> Snapshot:
        """Idempotent. NotFound for one that never was, or is forgotten for long."""
        async with self._lock(snapshot_id):
            row = self._rows.get(snapshot_id)
            if row is None or row.state is SnapshotState.MAKING:
                raise NotFound(f"no snapshot {snapshot_id}")
            await self._end(row)
            return row.view()

    async def _end(self, row: SnapshotRow) -> None:
        if row.state is SnapshotState.READY:
            await self._backend.forget_snapshot(row.id)
            await self._put(replace(row, state=SnapshotState.ENDED, ended_at=self._records.clock.now()))

    async def _put(self, row: SnapshotRow) -> None:
        await self._store.change(row, self._rows[row.id].state)
        self._rows[row.id] = row
        self._count()

    def _count(self) -> None:
        kept = sum(row.state is SnapshotState.READY for row in self._rows.values())
        self._metrics.set("sandbox/kept_snapshots", kept)

    async def shift(self, step: float) -> None:
        """As of the records; written at once."""
        for snapshot_id, row in list(self._rows.items()):
            if row.state is SnapshotState.MAKING:
                # Written when it is made, for which nobody else should wait.
                self._rows[snapshot_id] = replace(row, deadline=row.deadline + step)
                continue
            async with self._lock(snapshot_id):
                found = self._rows.get(snapshot_id)
                if found is not None and found.state is SnapshotState.READY:
                    await self._put(replace(found, deadline=found.deadline + step))

    async def sweep(self, *, everything: bool = False) -> None:
        """Forget those whose time ended, and what was left half made; with `everything`, all."""
        for snapshot_id in list(self._rows):
            lock, row = self._lock(snapshot_id), self._rows.get(snapshot_id)
            if row is None or lock.locked():
                continue
            async with lock:
                try:
                    await self._swept(row, everything=everything)
                except AgentRLError as error:
                    log.warning("snapshot %s is tried again at the next sweep: %s", snapshot_id, error.message)
        if not everything and time.monotonic() >= self._compare_at:
            self._compare_at = time.monotonic() + COMPARE_S
            try:
                await self._forget_unknown()
            except AgentRLError as error:
                log.warning("the backend's snapshots were not compared with ours: %s", error.message)

    async def _forget_unknown(self) -> None:
        """What a backend finished for a controller that had been killed, after its row was undone."""
        for snapshot_id in await self._backend.snapshots():
            lock, row = self._lock(snapshot_id), self._rows.get(snapshot_id)
            # The next leader knows of others.
            if not self._leads():
                return
            if lock.locked() or (row is not None and row.state is not SnapshotState.ENDED):
                continue
            async with lock:
                log.warning("snapshot %s is not in the store: forgetting it", snapshot_id)
                await self._backend.forget_snapshot(snapshot_id)

    async def _swept(self, row: SnapshotRow, *, everything: bool) -> None:
        now = self._records.clock.now()
        if row.state is SnapshotState.MAKING:
            await self._undo(row)
        elif row.state is SnapshotState.READY and (everything or row.deadline <= now):
            await self._end(row)
        elif row.state is SnapshotState.ENDED and row.ended_at < now - self._retention_s:
            await self._store.remove(row.id)
            self._rows.pop(row.id, None)
