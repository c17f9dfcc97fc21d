"""The store under gateway, sandbox and rollout: SQLite by default, Postgres by URL, through SQLAlchemy.

Each room owns its tables and its migrations; `open_database` brings them to the newest revision.
Invariant: `Database.write` returns only after its transaction is durable against `kill -9`. Concurrent
writes share one transaction (group commit), which on SQLite is what makes thousands of small writes cheap.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, TableClause, event, insert, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

T = TypeVar("T")
Work = Callable[[AsyncConnection], Awaitable[Any]]


class Database:
    """One room's connection to its store."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._write_engine = engine.execution_options(agentrl_write=True)
        self._queue: asyncio.Queue[tuple[Work, asyncio.Future[Any]]] = asyncio.Queue()
        self._writer = asyncio.create_task(self._run(), name="group-commit")

    async def write(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """Run `work` in a transaction that is durable on return. It may run twice, so it must only touch the store."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        await self._queue.put((work, done))
        return await done

    async def insert(self, table: TableClause, row: Mapping[str, Any]) -> None:
        """Add one row, durable on return. Rows of one table that wait together go in one statement."""
        await self.write(_Insert(table, row))

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        async with self.engine.connect() as connection:
            yield connection

    async def close(self) -> None:
        """Finish the queued writes, then disconnect."""
        await self._queue.join()
        self._writer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._writer
        await self.engine.dispose()

    async def _run(self) -> None:
        while True:
            batch = [await self._queue.get()]
            while not self._queue.empty() and len(batch) < 256:
                batch.append(self._queue.get_nowait())
            try:
                async with self._write_engine.begin() as connection:
                    await _insert_together(connection, [work for work, _ in batch])
                    results = [None if isinstance(work, _Insert) else await work(connection) for work, _ in batch]
            except asyncio.CancelledError:
                raise
            except Exception:
                await self._one_by_one(batch)
            else:
                for (_, done), result in zip(batch, results, strict=True):
                    if not done.done():
                        done.set_result(result)
            for _ in batch:
                self._queue.task_done()

    async def _one_by_one(self, batch: list[tuple[Work, asyncio.Future[Any]]]) -> None:
        """One work of the batch failed: run each alone, so that only the guilty one sees the error."""
        for work, done in batch:
            try:
                async with self._write_engine.begin() as connection:
                    result = await work(connection)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)


@dataclass(frozen=True, slots=True, eq=False)
class _Insert:
    """One row to add, as a unit of work."""

    table: TableClause
    row: Mapping[str, Any]

    async def __call__(self, connection: AsyncConnection) -> None:
        await connection.execute(insert(self.table), self.row)


async def _insert_together(connection: AsyncConnection, batch: Sequence[Work]) -> None:
    """The inserts of a batch, a statement a table: on SQLite a statement costs more than a row."""
    rows: dict[TableClause, list[Mapping[str, Any]]] = {}
    for work in batch:
        if isinstance(work, _Insert):
            rows.setdefault(work.table, []).append(work.row)
    for table, waiting in rows.items():
        await connection.execute(insert(table), waiting)


def _pragmas(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=10000", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Connection) -> None:
    """Writers take the lock at once: a deferred transaction that upgrades fails instead of waiting."""
    write = connection.get_execution_options().get("agentrl_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def sqlite_url(path: Path) -> str:
    return f"sqlite+aiosqlite:///{path}"


async def open_database(url: str, *, room: str, migrations: Path) -> Database:
    """Connect and migrate. `room` names the version table, so that rooms can share one database.

    `migrations` is a folder with `versions/*.py` in Alembic's format.
    """
    engine = create_async_engine(url)
    if engine.dialect.name == "sqlite":
        if engine.url.database:
            Path(engine.url.database).parent.mkdir(parents=True, exist_ok=True)
        event.listen(engine.sync_engine, "connect", _pragmas)
        event.listen(engine.sync_engine, "begin", _begin)
    async with engine.execution_options(agentrl_write=True).begin() as connection:
        await connection.run_sync(_migrate, room, migrations)
    return Database(engine)


def _migrate(connection: Connection, room: str, migrations: Path) -> None:
    if connection.dialect.name == "postgresql":
        # Processes that start together would both create the tables; SQLite's write lock already serialises them.
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtext(:room))"), {"room": room})
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "alembic"))
    config.set_main_option("version_locations", str(migrations / "versions"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    config.attributes["version_table"] = f"{room}_schema_version"
    command.upgrade(config, "head")
