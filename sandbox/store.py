"""The controller's records in SQLite or Postgres. Used by `controller` alone.

Invariants: an update applies only to the revision that we wrote or read last (compare-and-set); `save` returns
when its record is durable. Saves that come while one is being written share the next transaction, and of one
sandbox only the newest record is written. A store that is away is asked again until it is back: nothing is forgotten.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from agentrl.core.db import Database
from agentrl.core.errors import Conflict, ServiceUnavailable
from agentrl.core.types import SandboxSpec, SandboxState
from sandbox import feed
from sandbox.feed import Feed
from sandbox.snapshot_store import SnapshotStore
from sandbox.states import Record
from sandbox.store_errors import reachable
from sandbox.views import SandboxEvent

log = logging.getLogger(__name__)

PATIENCE_S, PAUSE_S = 30.0, 0.5
"""How long a save waits for a store that is away, and how often it is asked."""

sandboxes = sa.table(
    "sandboxes",
    *(sa.column(name) for name in ("id", "owner", "key", "digest", "spec", "state", "revision")),
    *(sa.column(name) for name in ("created_at", "deadline", "ended_at", "cause", "calls")),
)
INSERT = sandboxes.insert()
UPDATE = (
    sandboxes.update()
    .where(sandboxes.c.id == sa.bindparam("which"), sandboxes.c.revision == sa.bindparam("expected"))
    .values({name: sa.bindparam(name) for name in ("state", "revision", "deadline", "ended_at", "cause", "calls")})
)


class SandboxStore:
    def __init__(self, database: Database) -> None:
        self.feed = Feed(database)
        self.snapshots = SnapshotStore(database)
        self._database = database
        self._revisions: dict[str, int] = {}
        """Last durable revision of each live record."""
        self._pending: dict[str, Record] = {}
        self._unwritten: dict[str, Record] = {}
        """The newest record of each sandbox that is not durable as we were given it: it is what we answer with."""
        self._waiting: list[asyncio.Future[None]] = []
        self._flusher: asyncio.Task[None] | None = None
        self._closing = False

    async def save(self, record: Record) -> None:
        """Durable on return. Conflict when another controller changed the row or took the key.

        ServiceUnavailable when the store is away for long; the record is written all the same once it is back.
        """
        done = asyncio.get_running_loop().create_future()
        self._pending[record.id] = self._unwritten[record.id] = record
        self._waiting.append(done)
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush(), name="sandbox-store")
        try:
            async with asyncio.timeout(PATIENCE_S):
                await done
        except TimeoutError:
            raise ServiceUnavailable(f"the store has not answered for {PATIENCE_S:.0f} s") from None

    async def _flush(self) -> None:
        while self._pending:
            records, self._pending = list(self._pending.values()), {}
            waiting, self._waiting = self._waiting, []
            try:
                await self._write_surely(records)
            except Exception as error:
                for record in records:
                    if self._unwritten.get(record.id) is record:
                        del self._unwritten[record.id]
                _settle(waiting, error)
            else:
                _settle(waiting, None)
        self._flusher = None

    async def _write_surely(self, records: Sequence[Record]) -> None:
        """Write these and the events so far, once, however long the store is away."""
        events, asked = self.feed.waiting, False
        while True:
            try:
                # All of it may be there although no answer came: then a second try would find its own rows taken.
                if not (asked and await self._is_there(records[0])):
                    await self._write(records, events)
                break
            except ServiceUnavailable as error:
                if self._closing:
                    raise
                log.warning("%d sandbox records wait for the store: %s", len(records), error)
                asked = True
                await asyncio.sleep(PAUSE_S)
        self.feed.wrote(events)
        for record in records:
            if self._unwritten.get(record.id) is record:
                del self._unwritten[record.id]
            if record.live:
                self._revisions[record.id] = self._revisions.get(record.id, 0) + 1
            else:
                self._revisions.pop(record.id, None)

    async def _is_there(self, record: Record) -> bool:
        """Whether a record is in the store as we would write it."""
        written = _changes(record) | {"revision": self._revisions.get(record.id, 0) + 1}
        rows = await self._select(sandboxes.c.id == record.id)
        return any(all(row[name] == value for name, value in written.items()) for row in rows)

    async def _write(self, records: Sequence[Record], events: Sequence[SandboxEvent]) -> None:
        known = self._revisions
        inserts = [_row(r) | {"revision": 1} for r in records if r.id not in known]
        updates = [
            _changes(r) | {"which": r.id, "expected": known[r.id], "revision": known[r.id] + 1}
            for r in records
            if r.id in known
        ]

        async def work(connection: AsyncConnection) -> None:
            await feed.write(connection, events)
            if inserts:
                await connection.execute(INSERT, inserts)
            if updates:
                changed = await _update(connection, updates)
                if changed != len(updates):
                    raise Conflict(
                        f"{len(updates) - changed} of {len(updates)} sandboxes were changed by another "
                        "controller: nothing was written; run one controller on a store"
                    )

        async with reachable():
            await self._database.write(work)

    async def live(self) -> list[Record]:
        """The records that have not ended; from now on this store writes to them."""
        rows = await self._select(sandboxes.c.ended_at == 0.0)
        self._revisions |= {row["id"]: row["revision"] for row in rows}
        return [_record(row) for row in rows]

    async def keys(self) -> dict[tuple[str, str], str]:
        """Every (owner, key) with its sandbox's id."""
        query = sa.select(sandboxes.c.owner, sandboxes.c.key, sandboxes.c.id)
        async with self._database.read() as connection:
            return {(owner, key): found for owner, key, found in await connection.execute(query)}

    async def get(self, sandbox_id: str) -> Record | None:
        """The newest record that was saved, durable or not yet."""
        if sandbox_id in self._unwritten:
            return self._unwritten[sandbox_id]
        rows = await self._select(sandboxes.c.id == sandbox_id)
        return _record(rows[0]) if rows else None

    async def ended(self, owner: str | None) -> list[Record]:
        where = sandboxes.c.ended_at > 0.0
        rows = await self._select(where if owner is None else where & (sandboxes.c.owner == owner))
        return [_record(row) for row in rows]

    async def purge(self, before: float) -> list[tuple[str, str]]:
        """Forget records that ended before; returns their (owner, key)."""
        gone = (sandboxes.c.ended_at > 0.0) & (sandboxes.c.ended_at < before)

        async def work(connection: AsyncConnection) -> list[tuple[str, str]]:
            rows = (await connection.execute(sa.select(sandboxes.c.owner, sandboxes.c.key).where(gone))).all()
            if rows:
                await connection.execute(sandboxes.delete().where(gone))
            await feed.purge(connection, before)
            return [(owner, key) for owner, key in rows]

        async with reachable():
            return await self._database.write(work)

    async def _select(self, where: sa.ColumnElement[bool]) -> Sequence[sa.RowMapping]:
        async with reachable(), self._database.read() as connection:
            return (await connection.execute(sa.select(sandboxes).where(where))).mappings().all()

    async def close(self) -> None:
        self._closing = True
        if self._flusher is not None:
            await self._flusher
        await self._database.close()


def _settle(waiting: Sequence[asyncio.Future[None]], error: Exception | None) -> None:
    for done in waiting:
        if done.done():
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


async def _update(connection: AsyncConnection, updates: Sequence[dict[str, Any]]) -> int:
    """Returns the number of rows changed, which not every driver counts for a whole batch."""
    if connection.dialect.supports_sane_multi_rowcount:
        return (await connection.execute(UPDATE, updates)).rowcount
    return sum([(await connection.execute(UPDATE, update)).rowcount for update in updates])


def _row(record: Record) -> dict[str, Any]:
    identity = {"id": record.id, "owner": record.owner, "key": record.key, "digest": record.digest}
    return identity | {"spec": record.spec.model_dump_json(), "created_at": record.created_at} | _changes(record)


def _changes(record: Record) -> dict[str, Any]:
    return {
        "state": record.state.value, "deadline": record.deadline, "ended_at": record.ended_at, "cause": record.cause,
        "calls": json.dumps(dict(record.calls)) if record.calls else "{}",
    }  # fmt: skip


def _record(row: sa.RowMapping) -> Record:
    return Record(
        id=row["id"], owner=row["owner"], key=row["key"], digest=row["digest"],
        spec=SandboxSpec.model_validate_json(row["spec"]), state=SandboxState(row["state"]),
        created_at=row["created_at"], deadline=row["deadline"], ended_at=row["ended_at"], cause=row["cause"],
        calls=json.loads(row["calls"]),
    )  # fmt: skip
