"""The event feed on every store: whole, in order, over a restart; and the controller while its store is away."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sandboxes import TOKEN, sh
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from agentrl.core.config import SandboxConfig
from agentrl.core.http import serving
from agentrl.core.types import SandboxSpec
from sandbox.api import create_sandbox_app
from sandbox.client import SandboxClient

SPEC = SandboxSpec()
LIFE = ["CREATING", "READY", "CLOSING", "CLOSED"]
AWAY_S = 10.0


@asynccontextmanager
async def away(store_url: str) -> AsyncIterator[None]:
    """Nobody can write to the store: SQLite's lock is taken; Postgres lets nobody connect and ends who is."""
    database = make_url(store_url)
    if database.get_backend_name() == "sqlite":
        assert database.database
        holder = sqlite3.connect(database.database, isolation_level=None)
        holder.execute("BEGIN EXCLUSIVE")
        yield
        holder.rollback()
        holder.close()
        return
    admin = create_async_engine(os.environ["AGENTRL_TEST_POSTGRES"], isolation_level="AUTOCOMMIT")
    async with admin.connect() as connection:
        name = {"name": database.database}
        await connection.execute(text(f"ALTER DATABASE {database.database} ALLOW_CONNECTIONS false"))
        await connection.execute(
            text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"), name
        )
        yield
        await connection.execute(text(f"ALTER DATABASE {database.database} ALLOW_CONNECTIONS true"))
    await admin.dispose()


@asynccontextmanager
async def service(folder: Path, store_url: str) -> AsyncIterator[SandboxClient]:
    app = create_sandbox_app(SandboxConfig(), folder=folder, store_url=store_url, token=TOKEN, sweep_s=0.2)
    async with serving(app) as url:
        client = SandboxClient(url, token=TOKEN)
        yield client
        await client.close()


async def test_every_change_of_state_is_told_once_and_in_order(tmp_path: Path, store_url: str) -> None:
    async with service(tmp_path, store_url) as client:
        async with client.acquire(SPEC, owner="run-1", key="a") as sandbox:
            assert (await client.events(0, wait_s=5.0)).events
        following = asyncio.create_task(client.events(4, wait_s=20.0))
        page = await client.events(0)
        told = [(event.seq, event.sandbox, event.state) for event in page.events]
        assert told == [(1 + i, sandbox.id, state) for i, state in enumerate(LIFE)]
        assert (page.cursor, page.missed, page.events[3].cause) == (4, 0, "closed")
        assert not (await client.events(page.cursor)).events
        async with client.acquire(SPEC, owner="run-2", key="b"):
            assert (await following).events[0].owner == "run-2"
    async with service(tmp_path, store_url) as client:
        again = await client.events(4)
        assert [e.seq for e in again.events] == [5, 6, 7, 8]
        async with client.acquire(SPEC, owner="run-3", key="c"):
            assert (await client.events(8, wait_s=5.0)).events[0].seq == 9


async def test_a_store_that_is_away_loses_nothing(tmp_path: Path, store_url: str) -> None:
    """Creations wait for it, commands go on, and what ended meanwhile is told afterwards."""
    async with service(tmp_path, store_url) as client:
        async with client.acquire(SPEC, owner="run-1", key="a") as sandbox:
            async with away(store_url):
                creating = asyncio.create_task(client.create(SPEC, owner="run-1", key="b"))
                assert (await sandbox.exec(sh("echo still here"))).stdout == b"still here\n"
                await asyncio.sleep(AWAY_S)
                assert not creating.done()
            made = await creating
            assert made.state == "READY"
        await client.handle(made.id).close()
        await client.sweep()
        states = [event.state for event in (await client.events(0)).events if event.sandbox == made.id]
        assert states == LIFE
        assert {view.state for view in await client.list(live=False)} == {"CLOSED"}
