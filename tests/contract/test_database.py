"""The contract of `core.db.Database`, on SQLite and on Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from agentrl.core.db import Database, open_database

MIGRATION = """
import sqlalchemy as sa
from alembic import op
revision, down_revision = "0001", None
def upgrade() -> None:
    op.create_table("numbers", sa.Column("n", sa.Integer, primary_key=True))
"""
numbers = sa.table("numbers", sa.column("n", sa.Integer))


@pytest.fixture
def migrations(tmp_path: Path) -> Path:
    (tmp_path / "room" / "versions").mkdir(parents=True)
    (tmp_path / "room" / "versions" / "0001_initial.py").write_text(MIGRATION)
    return tmp_path / "room"


def insert(n: int) -> Callable[[AsyncConnection], Awaitable[None]]:
    async def work(connection: AsyncConnection) -> None:
        await connection.execute(sa.insert(numbers).values(n=n))

    return work


async def stored(database: Database) -> list[int]:
    async with database.read() as connection:
        return list((await connection.execute(sa.select(numbers.c.n).order_by(numbers.c.n))).scalars())


async def test_concurrent_writes_are_all_stored(store_url: str, migrations: Path) -> None:
    database = await open_database(store_url, room="room", migrations=migrations)
    await asyncio.gather(*(database.write(insert(n)) for n in range(500)))
    assert await stored(database) == list(range(500))
    await database.close()


async def test_one_failing_write_harms_no_other(store_url: str, migrations: Path) -> None:
    database = await open_database(store_url, room="room", migrations=migrations)
    results = await asyncio.gather(*(database.write(insert(n)) for n in (1, 2, 2, 3)), return_exceptions=True)
    assert [type(r) for r in results].count(IntegrityError) == 1
    assert await stored(database) == [1, 2, 3]
    await database.close()


async def test_rows_that_are_inserted_together_fail_alone(store_url: str, migrations: Path) -> None:
    database = await open_database(store_url, room="room", migrations=migrations)
    rows = [database.insert(numbers, {"n": n}) for n in (1, 2, 2, 3)]
    results = await asyncio.gather(*rows, database.write(insert(4)), return_exceptions=True)
    assert [type(r) for r in results].count(IntegrityError) == 1
    assert await stored(database) == [1, 2, 3, 4]
    await database.close()


async def test_two_processes_worth_of_writers_do_not_collide(store_url: str, migrations: Path) -> None:
    first = await open_database(store_url, room="room", migrations=migrations)
    second = await open_database(store_url, room="room", migrations=migrations)

    async def read_then_write(database: Database, n: int) -> None:
        async def work(connection: AsyncConnection) -> None:
            await connection.execute(sa.select(sa.func.count()).select_from(numbers))
            await connection.execute(sa.insert(numbers).values(n=n))

        await database.write(work)

    await asyncio.gather(*(read_then_write(first if n % 2 else second, n) for n in range(100)))
    assert await stored(first) == list(range(100))
    await first.close()
    await second.close()


async def test_writes_survive_reopening_and_rooms_share_a_store(store_url: str, migrations: Path) -> None:
    database = await open_database(store_url, room="room", migrations=migrations)
    await database.write(insert(7))
    await database.close()
    database = await open_database(store_url, room="room", migrations=migrations)
    assert await stored(database) == [7]
    async with database.read() as connection:
        names = await connection.run_sync(lambda c: sa.inspect(c).get_table_names())
    assert sorted(names) == ["numbers", "room_schema_version"]
    await database.close()
