"""A store on disk, and what fills it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agentrl.core.db import Database, sqlite_url
from agentrl.rollout.store import open_store_database


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return sqlite_url(tmp_path / "rollout.db")


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = await open_store_database(database_url)
    yield opened
    await opened.close()
