"""A controller over a backend that places names, not sandboxes: its operations can be stopped, or made to fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentrl.core.config import SandboxConfig
from agentrl.core.db import open_database, sqlite_url
from agentrl.core.errors import Ran, SandboxError, ServiceUnavailable
from agentrl.core.telemetry import Metrics
from agentrl.core.types import SandboxSpec
from sandbox.api import MIGRATIONS
from sandbox.backends.base import Ended, Inventory
from sandbox.channel import Answer, Channel
from sandbox.controller import Controller
from sandbox.metrics import SPECS
from sandbox.store import SandboxStore


class PlacingBackend:
    """Where the invariants of `sandbox.backends.base` do not hold, a method fails the test.

    The next call of an operation in `failures` raises what is there; one in `gates` waits in the middle.
    """

    isolation = "none"

    def __init__(self) -> None:
        self.failures: dict[str, Exception] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.placed: set[str] = set()
        self.paused: set[str] = set()
        self.kept: dict[str, str] = {}
        """Snapshots, with their sandboxes."""
        self.calls: list[tuple[str, str]] = []
        """Every operation that went through, with what it was done to."""
        self.looked = asyncio.Event()
        """Set when the inventory was given out."""
        self.channels: dict[str, NoddingChannel] = {}
        self.ended: Ended = lambda sandbox_id, cause: None
        self._turn: set[str] = set()

    async def start(self, ended: Ended) -> None:
        self.ended = ended

    async def stop(self) -> None:
        assert not self.placed
        assert not self.kept

    async def detach(self) -> None: ...

    async def create(self, sandbox_id: str, spec: SandboxSpec, owner: str) -> None:
        if spec.snapshot and spec.snapshot not in self.kept:
            raise SandboxError(f"the backend has no snapshot {spec.snapshot}")
        await self._does("create", sandbox_id)
        self.placed.add(sandbox_id)

    async def destroy(self, sandbox_id: str) -> None:
        await self._does("destroy", sandbox_id)
        self.placed.discard(sandbox_id)
        self.paused.discard(sandbox_id)

    async def inventory(self) -> Inventory:
        found = Inventory(live=frozenset(self.placed), ended={}, paused=frozenset(self.paused))
        await self._does("inventory", "")
        self.looked.set()
        return found

    def channel(self, sandbox_id: str) -> Channel:
        return self.channels.setdefault(sandbox_id, NoddingChannel(self, sandbox_id))

    async def pause(self, sandbox_id: str) -> None:
        await self._does("pause", sandbox_id)
        assert sandbox_id in self.placed
        self.paused.add(sandbox_id)

    async def resume(self, sandbox_id: str) -> None:
        await self._does("resume", sandbox_id)
        assert sandbox_id in self.placed
        self.paused.discard(sandbox_id)

    async def snapshot(self, sandbox_id: str, snapshot_id: str) -> None:
        self.kept[snapshot_id] = sandbox_id
        await self._does("snapshot", sandbox_id)
        assert sandbox_id in self.placed

    async def forget_snapshot(self, snapshot_id: str) -> None:
        await self._does("forget_snapshot", snapshot_id)
        self.kept.pop(snapshot_id, None)

    async def snapshots(self) -> frozenset[str]:
        found = frozenset(self.kept)
        await self._does("snapshots", "")
        return found

    async def _does(self, operation: str, what: str) -> None:
        exclusive = what and operation != "create"
        if exclusive:
            assert what not in self._turn, f"{operation} of {what} while another operation on it is under way"
            self._turn.add(what)
        try:
            await asyncio.sleep(0)
            if operation in self.gates:
                await self.gates[operation].wait()
            if operation in self.failures:
                raise self.failures.pop(operation)
        finally:
            if exclusive:
                self._turn.discard(what)
        self.calls.append((operation, what))


class NoddingChannel(Channel):
    """Leads to a sandboxd that says yes to everything; while it is paused it says nothing."""

    def __init__(self, backend: PlacingBackend, sandbox_id: str) -> None:
        super().__init__(sandbox_id, asyncio.Future)
        self.asked: list[str] = []
        """Requests that were answered."""
        self.leases: list[float] = []
        """Seconds of each renewal."""
        self.hold = asyncio.Event()
        """Requests whose target names `slow` wait for it."""
        self._backend, self._sandbox = backend, sandbox_id
        self._interrupted = asyncio.Event()

    async def request(
        self, method: str, target: str, *, body: bytes = b"", key: str = "", timeout_s: float = 30.0
    ) -> Answer:
        await asyncio.sleep(0)
        if self._sandbox not in self._backend.placed:
            raise ServiceUnavailable(f"sandboxd of {self._sandbox}: cannot connect", ran=Ran.NO)
        interrupted = self._interrupted
        while self._sandbox in self._backend.paused or ("slow" in target and not self.hold.is_set()):
            if interrupted.is_set():
                raise ServiceUnavailable(f"sandboxd of {self._sandbox}: no answer")
            await asyncio.sleep(0.001)
        if target == "/renew" and "renew" in self._backend.gates:
            await self._backend.gates["renew"].wait()
        self.asked.append(f"{method} {target}")
        if target == "/renew":
            self.leases.append(json.loads(body)["ttl_s"])
        return Answer(200, "application/json", b"{}")

    def interrupt(self) -> None:
        self._interrupted.set()
        self._interrupted = asyncio.Event()


@asynccontextmanager
async def controller(
    backend: PlacingBackend, folder: Path, *, sweep_s: float = 3600.0, leave: bool = False, **settings: Any
) -> AsyncIterator[Controller]:
    """A controller that started. With `leave` it ends as by a kill: nothing is closed, nothing is flushed."""
    database = await open_database(sqlite_url(folder / "sandbox.db"), room="sandbox", migrations=MIGRATIONS)
    store = SandboxStore(database)
    config = SandboxConfig.model_validate(settings)
    made = Controller(backend, store, metrics=Metrics(SPECS), config=config, sweep_s=sweep_s)
    await made.start()
    try:
        yield made
    finally:
        if leave:
            await made._halt()
            await store.close()
        else:
            await made.stop()
