"""One leader among the controllers of a store: a row with a lease, taken by compare-and-set. Used by `api`.

Invariants: each term has one holder; who cannot renew stops before its lease ends for others. Leases are compared on
the machines' clocks, which must agree within a third of a lease.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from agentrl.core.db import Database

log = logging.getLogger(__name__)

leaders = sa.table("sandbox_leader", *(sa.column(name) for name in ("name", "holder", "url", "term", "until")))
NAME = "controller"


def _clocks() -> tuple[float, float]:
    return time.monotonic(), time.time()


@dataclass(frozen=True, slots=True)
class Seat:
    """What the row says."""

    holder: str
    url: str
    term: int
    until: float
    """Unix seconds."""


class Election:
    """One candidate."""

    def __init__(self, database: Database, *, url: str, lease_s: float) -> None:
        self.seat: Seat | None = None
        """As it was seen last."""
        self._database, self._url, self._lease_s = database, url, lease_s
        self._holder = uuid.uuid4().hex
        self._term = 0
        """Ours while we lead, else 0."""
        self._renewed = (-math.inf, -math.inf)
        """When the newest claim or renewal that succeeded was asked for, on both clocks."""

    @property
    def leads(self) -> bool:
        """Whether nobody else can lead yet: false for one that slept, before it finds out what happened meanwhile."""
        return self._term > 0 and self._silent_s <= self._lease_s * 2 / 3

    @property
    def _silent_s(self) -> float:
        """Seconds since then. A process that was stopped sees it on either clock, a machine that slept on one."""
        return max(now - then for now, then in zip(_clocks(), self._renewed, strict=True))

    async def campaign(self) -> None:
        """Returns when we lead."""
        while True:
            asked = _clocks()
            if await self._try(self._claim):
                self._renewed = asked
                log.info("leading in term %d", self._term)
                return
            await asyncio.sleep(self._lease_s / 6)

    async def hold(self, lost: Callable[[], None]) -> None:
        """Renew until cancelled. Calls `lost` when another leads, or when we could not renew for most of a lease."""
        while True:
            await asyncio.sleep(self._lease_s / 6)
            asked = _clocks()
            if await self._try(self._renew):
                self._renewed = asked
            elif not self.leads:
                log.error("leadership was lost: another controller may lead now")
                lost()
                return

    async def resign(self) -> None:
        """Let the next one lead at once."""
        if self._term:
            await self._try(self._free)

    async def _try(self, work: Callable[[AsyncConnection], Awaitable[bool]]) -> bool:
        """A transaction's outcome; False also when the store does not answer soon."""
        try:
            async with asyncio.timeout(self._lease_s / 6):
                return await self._database.write(work)
        except (sa.exc.SQLAlchemyError, OSError, TimeoutError) as error:
            log.warning("the store did not answer about who leads: %s", error)
            return False

    async def _read(self, connection: AsyncConnection) -> Seat | None:
        row = (await connection.execute(sa.select(leaders).where(leaders.c.name == NAME))).mappings().first()
        self.seat = Seat(row["holder"], row["url"], row["term"], row["until"]) if row else None
        return self.seat

    async def _claim(self, connection: AsyncConnection) -> bool:
        seat, now = await self._read(connection), time.time()
        if seat is not None and seat.until > now:
            # Ours when an earlier claim was written after we had stopped waiting for its answer.
            self._term = seat.term if seat.holder == self._holder else 0
            return self._term > 0
        ours = {"holder": self._holder, "url": self._url, "until": now + self._lease_s}
        if seat is None:
            await connection.execute(leaders.insert(), {"name": NAME, "term": 1} | ours)
            self._term = 1
            return True
        free = (leaders.c.name == NAME) & (leaders.c.term == seat.term) & (leaders.c.until == seat.until)
        taken = await connection.execute(leaders.update().where(free).values(term=seat.term + 1, **ours))
        self._term = seat.term + 1 if taken.rowcount == 1 else 0
        return self._term > 0

    async def _renew(self, connection: AsyncConnection) -> bool:
        return await self._set_until(connection, time.time() + self._lease_s)

    async def _free(self, connection: AsyncConnection) -> bool:
        return await self._set_until(connection, 0.0)

    async def _set_until(self, connection: AsyncConnection, until: float) -> bool:
        ours = (leaders.c.name == NAME) & (leaders.c.holder == self._holder) & (leaders.c.term == self._term)
        changed = await connection.execute(leaders.update().where(ours).values(until=until))
        if changed.rowcount == 0:
            self._term = 0
        return self._term > 0
