"""What `Database.write` acknowledged is in the store after `kill -9`."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import sqlalchemy as sa

from agentrl.core.db import open_database, sqlite_url

MIGRATION = """
import sqlalchemy as sa
from alembic import op
revision, down_revision = "0001", None
def upgrade() -> None:
    op.create_table("numbers", sa.Column("n", sa.Integer, primary_key=True))
"""
WRITER = """
import asyncio, sys
from pathlib import Path
import sqlalchemy as sa
from agentrl.core.db import open_database

async def main(url, migrations):
    database = await open_database(url, room="room", migrations=Path(migrations))
    async def write(n):
        await database.write(lambda c: c.execute(sa.text("INSERT INTO numbers VALUES (:n)"), {"n": n}))
        print(n, flush=True)
    n = 0
    while True:
        await asyncio.gather(*(write(n + i) for i in range(7)))
        n += 7

asyncio.run(main(*sys.argv[1:]))
"""


def acknowledged_before_the_kill(url: str, migrations: Path) -> set[int]:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, url, str(migrations)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    numbers = [int(writer.stdout.readline()) for _ in range(200)]
    writer.send_signal(signal.SIGKILL)
    numbers += [int(line) for line in writer.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    writer.stdout.close()
    writer.wait()
    return set(numbers)


def test_acknowledged_writes_survive_kill_9(tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir()
    (tmp_path / "versions" / "0001_initial.py").write_text(MIGRATION)
    url = sqlite_url(tmp_path / "store.db")
    acknowledged = acknowledged_before_the_kill(url, tmp_path)

    async def stored() -> set[int]:
        database = await open_database(url, room="room", migrations=tmp_path)
        async with database.read() as connection:
            numbers = set((await connection.execute(sa.text("SELECT n FROM numbers"))).scalars())
        await database.close()
        return numbers

    assert acknowledged <= asyncio.run(stored())
