"""The records on their way into the store: the newest wins, whoever writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.core.db import open_database, sqlite_url
from agentrl.core.telemetry import Metrics
from agentrl.core.types import SandboxSpec, SandboxState
from sandbox.api import MIGRATIONS
from sandbox.metrics import SPECS
from sandbox.records import Records
from sandbox.store import SandboxStore


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SandboxStore]:
    made = SandboxStore(await open_database(sqlite_url(tmp_path / "s.db"), room="sandbox", migrations=MIGRATIONS))
    yield made
    await made.close()


@pytest.mark.parametrize("turns", range(6))
async def test_a_record_that_ends_while_it_is_written_stays_ended(store: SandboxStore, turns: int) -> None:
    records = Records(store, metrics=Metrics(SPECS), retention_s=60.0, ended=lambda sandbox_id: None)
    record = records.new("o", "k", SandboxSpec(), digest="d", state=SandboxState.CREATING)
    await records.save(record)
    closing = records.step(records.step(record, SandboxState.READY), SandboxState.CLOSING)
    flushing = asyncio.create_task(records.flush())
    for _ in range(turns):
        await asyncio.sleep(0)
    await records.end(closing, SandboxState.CLOSED, "closed")
    await flushing
    assert not await store.live()
    (ended,) = await store.ended(None)
    assert ended.state is SandboxState.CLOSED
