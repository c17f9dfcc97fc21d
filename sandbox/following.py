"""A process that is followed: its output as it comes. Used by `handle`; given out by `RemoteSandbox`.

Invariants: every byte that is still kept comes once and in order, across restarts of the controller; a process does not
outlive the block that it was started in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from agentrl.core.errors import AgentRLError
from agentrl.core.types import OutputChunk, ProcessView

Stream = Literal["stdout", "stderr"]
LOOK_S = 20.0
"""How long one look at the output waits."""
END_S = 5.0
"""How long the end of a block waits for the end of what ran in it."""
SIGKILL = 9


@dataclass(frozen=True, slots=True)
class Piece:
    """Some output of a process."""

    stream: Stream
    data: bytes
    missed: int
    """Bytes before it that are no longer kept."""


class Processes(Protocol):
    """What following takes of a sandbox; see `agentrl.core.protocols.ProcessSandbox`."""

    async def process(self, process_id: str, *, wait_s: float = 0.0) -> ProcessView: ...

    async def output(
        self, process_id: str, *, stream: Stream = "stdout", offset: int = 0, wait_s: float = 0.0
    ) -> OutputChunk: ...

    async def signal(self, process_id: str, number: int) -> ProcessView: ...

    async def send_input(self, process_id: str, data: bytes, *, last: bool = False) -> ProcessView: ...


async def follow(sandbox: Processes, process_id: str, stream: Stream, offset: int) -> AsyncGenerator[OutputChunk, None]:
    """What a process wrote from `offset` on, as it comes, to its end."""
    while True:
        chunk = await sandbox.output(process_id, stream=stream, offset=offset, wait_s=LOOK_S)
        if chunk.data or chunk.ended:
            yield chunk
        if chunk.ended:
            return
        offset = chunk.offset + len(chunk.data)


class RemoteProcess:
    """One process of a sandbox."""

    def __init__(self, sandbox: Processes, process_id: str) -> None:
        self.id = process_id
        self._sandbox = sandbox

    async def send(self, data: bytes, *, last: bool = False) -> None:
        await self._sandbox.send_input(self.id, data, last=last)

    async def signal(self, number: int) -> None:
        await self._sandbox.signal(self.id, number)

    async def wait(self) -> ProcessView:
        """How it ended, once it did."""
        while True:
            view = await self._sandbox.process(self.id, wait_s=LOOK_S)
            if view.status != "RUNNING":
                return view

    async def output(self) -> AsyncGenerator[Piece, None]:
        """Both streams' output from the beginning, as it comes, to the end of both."""
        seen: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        looks: dict[Stream, asyncio.Task[OutputChunk]] = {}
        try:
            while seen:
                for stream in seen.keys() - looks.keys():
                    look = self._sandbox.output(self.id, stream=stream, offset=seen[stream], wait_s=LOOK_S)
                    looks[stream] = asyncio.ensure_future(look)
                await asyncio.wait(looks.values(), return_when=asyncio.FIRST_COMPLETED)
                for stream in [stream for stream, look in looks.items() if look.done()]:
                    chunk = looks.pop(stream).result()
                    missed, seen[stream] = chunk.offset - seen[stream], chunk.offset + len(chunk.data)
                    if chunk.ended:
                        del seen[stream]
                    if chunk.data:
                        yield Piece(stream, chunk.data, missed)
        finally:
            for left in looks.values():
                left.cancel()
            await asyncio.gather(*looks.values(), return_exceptions=True)

    async def end(self) -> None:
        """Kill it and what it started, unless it ended. What cannot be reached, the sandbox's own end kills."""
        with suppress(AgentRLError, TimeoutError):
            async with asyncio.timeout(END_S):
                if (await self._sandbox.process(self.id)).status == "RUNNING":
                    await self._sandbox.signal(self.id, SIGKILL)
