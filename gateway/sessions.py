"""All sessions of a gateway: opened once, found by key or id, read back from the store when not in memory.

Called by the routes. Invariant: a session exists in memory at most once, and whatever is not in memory can be
brought back from the store, by this process or by the next.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict

from sqlalchemy.exc import SQLAlchemyError

from agentrl.core.errors import Conflict, NotFound, Unauthorized
from agentrl.core.types import SessionRequest, Trajectory
from gateway.session import Services, Session
from gateway.store import StoredSession
from gateway.tree import Tree

log = logging.getLogger(__name__)

PURGE_S = 60.0
"""Seconds between purges of the store."""
IN_MEMORY = 4096
"""Sessions kept in memory; beyond that the ones idle for longest go back to the store."""


class Sessions:
    """The registry."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._live: OrderedDict[str, Session] = OrderedDict()
        self._id_of_key: dict[str, str] = {}

    async def open(self, request: SessionRequest, *, idempotency_key: str = "") -> Session:
        """A new session; with a key that was used before, the session of that time. Durable on return."""
        session_id = idempotency_key or secrets.token_hex(12)
        stored = StoredSession(session_id, f"sk-{secrets.token_urlsafe(24)}", request, time.time(), sealed=False)
        if await self._services.store.add_session(stored):
            return self._adopt(Session(stored, Tree(), self._services))
        known = await self.by_id(session_id)
        if known.request != request:
            raise Conflict(f"Idempotency-Key {idempotency_key!r} was used to open another session")
        return known

    async def by_key(self, key: str) -> Session:
        """The session that a harness's key opens. Unauthorized when there is none."""
        session_id = self._id_of_key.get(key)
        if session_id is not None:
            return self._touch(self._live[session_id])
        stored = await self._services.store.find_session(key=key) if key else None
        if stored is None:
            raise Unauthorized("unknown session key")
        return await self._load(stored)

    async def by_id(self, session_id: str) -> Session:
        if session_id in self._live:
            return self._touch(self._live[session_id])
        stored = await self._services.store.find_session(session_id=session_id)
        if stored is None:
            raise NotFound(f"no session {session_id!r}")
        return await self._load(stored)

    async def seal(self, session_id: str) -> tuple[Trajectory, ...]:
        session = await self.by_id(session_id)
        trajectories = await session.seal()
        self._forget(session)
        return trajectories

    async def keep_tidy(self, keep_s: float) -> None:
        """Forever: forget sessions whose time was over `keep_s` ago. Whoever wanted their trajectories has them."""
        while True:
            try:
                while gone := await self._services.store.purge(time.time() - keep_s):
                    for session_id in gone:
                        if session_id in self._live:
                            self._forget(self._live[session_id])
                    self._services.metrics.inc("gateway/sessions_purged_total", len(gone))
            except SQLAlchemyError:
                log.exception("the store cannot be purged; the next try is in %.0f s", PURGE_S)
            await asyncio.sleep(PURGE_S)

    async def close(self) -> None:
        for session in list(self._live.values()):
            await session.close()

    async def _load(self, stored: StoredSession) -> Session:
        tree = await self._services.store.load_tree(stored.id)
        # Another request may have loaded it meanwhile.
        known = self._live.get(stored.id)
        return self._touch(known) if known else self._adopt(Session(stored, tree, self._services))

    def _adopt(self, session: Session) -> Session:
        self._live[session.id] = session
        self._id_of_key[session.key] = session.id
        oldest_idle = next((old for old in self._live.values() if old.idle and old is not session), None)
        if oldest_idle is not None and len(self._live) > IN_MEMORY:
            self._forget(oldest_idle)
        self._services.metrics.set("gateway/sessions_live", len(self._live))
        return session

    def _touch(self, session: Session) -> Session:
        self._live.move_to_end(session.id)
        return session

    def _forget(self, session: Session) -> None:
        if self._live.pop(session.id, None) is not None:
            del self._id_of_key[session.key]
            self._services.pool.release(session.id)
            self._services.metrics.set("gateway/sessions_live", len(self._live))
