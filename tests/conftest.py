"""Fixtures that several rooms share, and the switch that turns a skipped test into a failure (for CI)."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from agentrl.core.db import sqlite_url

POSTGRES = "AGENTRL_TEST_POSTGRES"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forbid-skips", action="store_true", help="a skipped test fails the run")
    parser.addoption("--may-skip", metavar="TEXT", help="but not one whose reason holds this text")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    may = session.config.getoption("--may-skip")
    skipped = [report for report in skipped if not may or may not in str(report.longrepr)]
    if session.config.getoption("--forbid-skips") and skipped and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(params=["sqlite", "postgres"])
async def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """The URL of a fresh, empty store: SQLite, and Postgres where AGENTRL_TEST_POSTGRES names a server."""
    if request.param == "sqlite":
        yield sqlite_url(tmp_path / "store.db")
        return
    if POSTGRES not in os.environ:
        pytest.skip(f"set {POSTGRES} to a SQLAlchemy URL of a Postgres server to run this test on it")
    admin_url = make_url(os.environ[POSTGRES])
    name = f"test_{uuid.uuid4().hex[:12]}"
    admin = create_async_engine(admin_url, isolation_level="AUTOCOMMIT")
    async with admin.connect() as connection:
        await connection.execute(text(f"CREATE DATABASE {name}"))
    yield admin_url.set(database=name).render_as_string(hide_password=False)
    async with admin.connect() as connection:
        await connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    await admin.dispose()
