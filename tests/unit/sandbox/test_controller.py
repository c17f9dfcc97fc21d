"""The controller over a backend that fails: what was half done is done by the next sweep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentrl.core.config import SandboxConfig
from agentrl.core.db import open_database, sqlite_url
from agentrl.core.errors import SandboxError
from agentrl.core.telemetry import Metrics
from agentrl.core.types import SandboxSpec, SandboxState
from sandbox.api import MIGRATIONS
from sandbox.backends.base import Ended, Inventory
from sandbox.channel import Channel
from sandbox.controller import Controller
from sandbox.metrics import SPECS
from sandbox.store import SandboxStore


class FailingBackend:
    """Places nothing. The next call of an operation in `failures` raises what is there."""

    isolation = "none"

    def __init__(self) -> None:
        self.failures: dict[str, Exception] = {}
        self.placed: set[str] = set()
        self.looked = asyncio.Event()
        """Set when the inventory was given out."""

    async def start(self, ended: Ended) -> None: ...

    async def stop(self) -> None: ...

    async def create(self, sandbox_id: str, spec: SandboxSpec, owner: str) -> None:
        self.placed.add(sandbox_id)

    async def destroy(self, sandbox_id: str) -> None:
        self._fail("destroy")
        self.placed.discard(sandbox_id)

    async def inventory(self) -> Inventory:
        self._fail("inventory")
        self.looked.set()
        return Inventory(live=frozenset(self.placed), ended={})

    def channel(self, sandbox_id: str) -> Channel:
        raise NotImplementedError

    async def pause(self, sandbox_id: str) -> None: ...

    async def resume(self, sandbox_id: str) -> None: ...

    async def snapshot(self, sandbox_id: str, snapshot_id: str) -> None: ...

    async def forget_snapshot(self, snapshot_id: str) -> None: ...

    def _fail(self, operation: str) -> None:
        if operation in self.failures:
            raise self.failures.pop(operation)


@asynccontextmanager
async def controller(backend: FailingBackend, folder: Path, *, sweep_s: float) -> AsyncIterator[Controller]:
    database = await open_database(sqlite_url(folder / "sandbox.db"), room="sandbox", migrations=MIGRATIONS)
    made = Controller(
        backend, SandboxStore(database), metrics=Metrics(SPECS), config=SandboxConfig(capacity=1), sweep_s=sweep_s
    )
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def test_a_close_that_failed_is_finished_by_the_next_sweep(tmp_path: Path) -> None:
    backend = FailingBackend()
    async with controller(backend, tmp_path, sweep_s=3600.0) as made:
        record = await made.create("o", "k", SandboxSpec())
        backend.failures["destroy"] = SandboxError("the fork server ended")
        with pytest.raises(SandboxError):
            await made.close(record.id, "closed")
        await made.sweep()
        assert (await made.records.get(record.id)).state is SandboxState.CLOSED
        await made.create("o", "again", SandboxSpec())


async def test_sweeps_go_on_whatever_failed(tmp_path: Path) -> None:
    backend = FailingBackend()
    async with controller(backend, tmp_path, sweep_s=0.01):
        backend.failures["inventory"] = RuntimeError("the disk is full")
        backend.looked.clear()
        async with asyncio.timeout(10):
            await backend.looked.wait()
        assert not backend.failures
