"""The event feed: every change of state, numbered, in the store. Used by `store`, which writes it, and `api`.

Invariants: numbers have no gaps and are given in the order of the changes; a number is taken once, so a second
controller on the store cannot add to the feed unseen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from agentrl.core.db import Database
from agentrl.core.types import SandboxState
from sandbox.states import Record
from sandbox.store_errors import reachable
from sandbox.views import EventPage, SandboxEvent

events = sa.table("sandbox_events", *(sa.column(n) for n in ("seq", "at", "sandbox", "owner", "state", "cause")))
INSERT = events.insert()
PAGE = 1000
"""Most events in one answer."""


class Feed:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[SandboxEvent] = []
        """Changes that are not in the store yet."""
        self._written = asyncio.Event()
        """Set and replaced whenever events were written."""
        self._last = 0
        """The newest number given."""

    async def load(self) -> None:
        async with reachable(), self._database.read() as connection:
            self._last = (await connection.execute(sa.select(sa.func.max(events.c.seq)))).scalar() or 0

    def note(self, record: Record) -> None:
        """Add a change; it is written with the next records."""
        self._last += 1
        self._waiting.append(
            SandboxEvent(
                seq=self._last, at=time.time(), sandbox=record.id, owner=record.owner, state=record.state,
                cause=record.cause,
            )
        )  # fmt: skip

    @property
    def waiting(self) -> Sequence[SandboxEvent]:
        return tuple(self._waiting)

    def wrote(self, written: Sequence[SandboxEvent]) -> None:
        """These are durable: wake who waits for them."""
        if written:
            del self._waiting[: len(written)]
            self._written.set()
            self._written = asyncio.Event()

    async def page(self, after: int, *, wait_s: float = 0.0) -> EventPage:
        """The durable events numbered above `after`; when there are none, those of the next `wait_s` seconds."""
        written = self._written
        page = await self._read(after)
        if not page.events and wait_s > 0:
            try:
                async with asyncio.timeout(wait_s):
                    await written.wait()
            except TimeoutError:
                return page
            page = await self._read(after)
        return page

    async def _read(self, after: int) -> EventPage:
        query = sa.select(events).where(events.c.seq > after).order_by(events.c.seq).limit(PAGE)
        async with reachable(), self._database.read() as connection:
            rows = (await connection.execute(query)).mappings().all()
        found = tuple(SandboxEvent(**{**row, "state": SandboxState(row["state"])}) for row in rows)
        return EventPage(
            events=found,
            cursor=found[-1].seq if found else after,
            missed=found[0].seq - after - 1 if found else 0,
        )


async def write(connection: AsyncConnection, waiting: Sequence[SandboxEvent]) -> None:
    if waiting:
        await connection.execute(INSERT, [event.model_dump() | {"state": event.state.value} for event in waiting])


async def purge(connection: AsyncConnection, before: float) -> None:
    """Forget old events, but never the newest: its number is where the count goes on."""
    newest = sa.select(sa.func.max(events.c.seq)).scalar_subquery()
    await connection.execute(events.delete().where(events.c.at < before, events.c.seq < newest))
