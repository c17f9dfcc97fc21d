"""Sandboxes with a command running in each, while the fault tests of a backend kill the controller.

Invariant: `finish` fails unless each command ran exactly once, whoever was killed meanwhile.
"""

from __future__ import annotations

import asyncio

from sandboxes import sh

from agentrl.core.types import SandboxSpec
from sandbox.client import RemoteSandbox, SandboxClient


class Held:
    def __init__(self, client: SandboxClient, *, seconds: int) -> None:
        self._client, self._script = client, f"echo start >> runs; sleep {seconds}; echo end >> runs"
        self._release, self._ready = asyncio.Event(), asyncio.Semaphore(0)
        self._sandboxes: list[RemoteSandbox] = []
        self._tasks: list[asyncio.Task[bytes]] = []

    @property
    def ids(self) -> set[str]:
        return {sandbox.id for sandbox in self._sandboxes}

    async def start(self, count: int) -> None:
        """Returns when the commands run."""
        self._tasks = [asyncio.create_task(self._hold(i)) for i in range(count)]
        for _ in self._tasks:
            await self._ready.acquire()
        await asyncio.sleep(0.3)

    async def finish(self) -> None:
        """Wait for the commands, then close the sandboxes."""
        self._release.set()
        outputs = await asyncio.gather(*self._tasks)
        assert outputs == [b"start\nend\n"] * len(self._tasks), "each command ran exactly once"

    async def _hold(self, i: int) -> bytes:
        async with self._client.acquire(SandboxSpec(), owner="test", key=f"k{i}") as sandbox:
            self._sandboxes.append(sandbox)
            self._ready.release()
            await sandbox.exec(sh(self._script), key=f"e{i}")
            await self._release.wait()
            return (await sandbox.exec(sh("cat runs"))).stdout
