"""The gateway's tables on SQLite and Postgres."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection

from agentrl.core.db import Database
from agentrl.core.types import Limits, SessionRequest
from gateway.store import PURGED_AT_ONCE, SessionStore, StoredSession, metadata, open_store


@pytest.fixture
async def database(store_url: str) -> AsyncIterator[Database]:
    opened = await open_store(store_url)
    yield opened
    await opened.close()


def session(number: int, *, opened_at: float) -> StoredSession:
    request = SessionRequest(task_id="t", limits=Limits(wall_s=10))
    return StoredSession(f"s{number}", f"key-{number}", request, opened_at, sealed=False)


async def test_migrations_create_the_tables_as_described(database: Database) -> None:
    def differences(connection: Connection) -> list[Any]:
        context = MigrationContext.configure(connection, opts={"version_table": "gateway_schema_version"})
        return list(compare_metadata(context, metadata))

    async with database.read() as connection:
        assert await connection.run_sync(differences) == []


async def test_a_purge_takes_the_sessions_that_ended_before(database: Database) -> None:
    store = SessionStore(database)
    for number in range(PURGED_AT_ONCE + 1):
        await store.add_session(session(number, opened_at=100.0))
    await store.add_session(session(-1, opened_at=101.0))
    assert await store.purge(110.0) == ()
    first, second = await store.purge(110.5), await store.purge(110.5)
    assert (len(first), len(second), len({*first, *second})) == (PURGED_AT_ONCE, 1, PURGED_AT_ONCE + 1)
    assert await store.purge(110.5) == ()
    assert await store.find_session(session_id="s-1") is not None
    assert await store.find_session(session_id="s0") is None


async def test_who_takes_no_calls_is_remembered(database: Database) -> None:
    store = SessionStore(database)
    assert await store.held_back() == frozenset()
    for url, accepting in (("a", False), ("b", False), ("a", True), ("c", True)):
        await store.set_accepting(url, accepting)
    assert await store.held_back() == {"b"}
