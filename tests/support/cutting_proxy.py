"""A proxy that cuts the connection of chosen requests, before or after they were delivered. For tests of retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal
from urllib.parse import urlsplit


class CuttingProxy:
    """Between a client and the server at `target`; speaks as much HTTP as they do."""

    def __init__(self, target: str) -> None:
        url = urlsplit(target)
        self._host, self._port = url.hostname, url.port
        self.url = ""
        self.cuts: dict[str, Literal["before", "after"]] = {}
        """By `METHOD last-part-of-the-path`: the next such request is cut."""
        self.seen: list[str] = []
        """Every request that came, and ` cut` behind those that were."""
        self.goes_away = False
        """Whether nobody can connect any more after a cut."""
        self.server: asyncio.Server | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = await asyncio.open_connection(self._host, self._port)
        try:
            while head := await self._head(reader):
                method, path, _ = head.split(b" ", 2)
                name = f"{method.decode()} {path.decode().partition('?')[0].rpartition('/')[2]}"
                cut = self.cuts.pop(name, None)
                self.seen.append(f"{name} cut" if cut else name)
                body = await self._body(reader, head)
                if cut and self.goes_away and self.server is not None:
                    self.server.close()
                if cut == "before":
                    return
                onward[1].write(head + body)
                answer = await self._head(onward[0])
                answer += await self._body(onward[0], answer)
                if cut == "after":
                    return
                writer.write(answer)
        except (EOFError, OSError):
            return
        finally:
            writer.close()
            onward[1].close()

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return b""

    async def _body(self, reader: asyncio.StreamReader, head: bytes) -> bytes:
        lines = head.decode("latin-1").lower().split("\r\n")
        lengths = [line.partition(":")[2] for line in lines if line.startswith("content-length:")]
        return await reader.readexactly(int(lengths[0])) if lengths else b""


@asynccontextmanager
async def cutting(target: str, *, port: int = 0) -> AsyncIterator[CuttingProxy]:
    proxy = CuttingProxy(target)
    server = proxy.server = await asyncio.start_server(proxy.serve, "127.0.0.1", port)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await server.wait_closed()
