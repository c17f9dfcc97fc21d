"""Snapshots as rows. Used by `snapshots`, part of `store`.

Invariant: a row is there before the backend has anything of the snapshot, and until it has nothing of it any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from agentrl.core.db import Database
from agentrl.core.errors import Conflict
from agentrl.core.types import Snapshot
from sandbox.store_errors import reachable

NAMES = ("id", "owner", "sandbox", "digest", "state", "created_at", "deadline", "ended_at")
snapshots = sa.table("sandbox_snapshots", *(sa.column(name) for name in NAMES))


class SnapshotState(StrEnum):
    MAKING = "MAKING"
    """The backend may have all, some or nothing of it."""
    READY = "READY"
    ENDED = "ENDED"
    """Kept for a while, so that a replayed key makes no second one."""


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    id: str
    owner: str
    sandbox: str
    digest: str
    """Of the request: a replay must match it."""
    state: SnapshotState
    created_at: float
    deadline: float
    ended_at: float = 0.0

    def view(self) -> Snapshot:
        return Snapshot(
            id=self.id, owner=self.owner, sandbox=self.sandbox, created_at=self.created_at, deadline=self.deadline
        )


class SnapshotStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self) -> Sequence[SnapshotRow]:
        async with reachable(), self._database.read() as connection:
            rows = (await connection.execute(sa.select(snapshots))).mappings().all()
        return [SnapshotRow(**{**row, "state": SnapshotState(row["state"])}) for row in rows]

    async def add(self, row: SnapshotRow) -> None:
        """Durable on return; Conflict when there is one with this id, other than one that was not made."""
        halfway = (snapshots.c.id == row.id) & (snapshots.c.state == SnapshotState.MAKING.value)
        values = {name: getattr(row, name) for name in NAMES} | {"state": row.state.value}

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(snapshots.delete().where(halfway))
            await connection.execute(snapshots.insert(), values)

        async with reachable():
            await self._database.write(work)

    async def change(self, row: SnapshotRow, before: SnapshotState) -> None:
        """Durable on return; Conflict when it is neither in the state `before` nor already as it shall be.

        It is, when an earlier change was written, but whoever asked for it was cancelled, or got no answer.
        """
        which = (snapshots.c.id == row.id) & snapshots.c.state.in_([before.value, row.state.value])
        values = {"state": row.state.value, "deadline": row.deadline, "ended_at": row.ended_at}

        async def work(connection: AsyncConnection) -> None:
            if (await connection.execute(snapshots.update().where(which).values(values))).rowcount != 1:
                raise Conflict(f"snapshot {row.id} was changed by another controller: run one controller on a store")

        async with reachable():
            await self._database.write(work)

    async def remove(self, snapshot_id: str) -> None:
        async def work(connection: AsyncConnection) -> None:
            await connection.execute(snapshots.delete().where(snapshots.c.id == snapshot_id))

        async with reachable():
            await self._database.write(work)
