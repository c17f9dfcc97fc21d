"""Counts the seconds that an episode spends in its sandbox's calls. Handed to the agent in place of the sandbox.

Invariant: it changes nothing but the count.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import TypeVar

from agentrl.core.protocols import Sandbox
from agentrl.core.types import ExecRequest, ExecResult

T = TypeVar("T")


class TimedSandbox:
    """See `protocols.Sandbox`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.seconds = 0.0

    @property
    def id(self) -> str:
        return self._sandbox.id

    async def exec(self, request: ExecRequest, *, key: str | None = None) -> ExecResult:
        return await self._timed(self._sandbox.exec(request, key=key))

    async def read(self, path: str) -> bytes:
        return await self._timed(self._sandbox.read(path))

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._timed(self._sandbox.write(path, data, mode=mode))

    async def renew(self, ttl_s: float) -> None:
        await self._timed(self._sandbox.renew(ttl_s))

    async def close(self) -> None:
        await self._timed(self._sandbox.close())

    async def _timed(self, call: Awaitable[T]) -> T:
        began = time.monotonic()
        try:
            return await call
        finally:
            self.seconds += time.monotonic() - began
