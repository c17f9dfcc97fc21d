"""The way to one sandboxd: HTTP/1.1 over kept connections. Used by `controller`; made by backends.

Hand-written since it carries every command of every episode: a general client costs more than the command.
Invariant: a connection is reused only after its answer was read whole.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.core.errors import Ran, ServiceUnavailable

log = logging.getLogger(__name__)

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LONGEST_ANSWER = 1 << 30
"""Bytes; more is no sandboxd's, but of somebody who wants our memory."""
KEPT_IDLE = 8
"""Connections that wait for a next request: by some ways in, each takes memory and a process of the sandbox."""
QUEUE_S = 10.0
"""How long to wait for a place among those who connect."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    kind: str
    """Content type."""
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    """All of them, by lower-case names."""


class Channel:
    """Requests to one sandboxd; as many connections as there are requests at once."""

    def __init__(self, where: str, connect: Callable[[], Awaitable[Stream]], *, token: str = "") -> None:
        self._where = where
        self._connect = connect
        self._auth = f"authorization: Bearer {token}\r\n" if token else ""
        self._idle: list[Stream] = []
        self._asking: set[asyncio.StreamWriter] = set()
        """Connections with a request on its way."""

    async def request(
        self, method: str, target: str, *, body: bytes = b"", key: str = "", timeout_s: float = 30.0
    ) -> Answer:
        """One request. ServiceUnavailable when sandboxd cannot be reached (ran=no) or does not answer (ran=maybe)."""
        keyed = f"idempotency-key: {key}\r\n" if key else ""
        head = f"{method} {target} HTTP/1.1\r\ncontent-length: {len(body)}\r\n{keyed}{self._auth}\r\n".encode()
        try:
            stream = self._idle.pop() if self._idle else await self._connect()
        except OSError as error:
            raise ServiceUnavailable(f"sandboxd of {self._where}: cannot connect: {error}", ran=Ran.NO) from error
        self._asking.add(stream[1])
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._exchange(stream, head, body)
        except (OSError, EOFError, TimeoutError, ValueError, LookupError, asyncio.LimitOverrunError) as error:
            # The last three: what came is no answer of a sandboxd.
            stream[1].close()
            raise ServiceUnavailable(
                f"sandboxd of {self._where}: no answer to {method} {target.partition('?')[0]}: "
                f"{type(error).__name__}: {error}"
            ) from error
        except BaseException:
            stream[1].close()
            raise
        finally:
            self._asking.discard(stream[1])
        if len(self._idle) < KEPT_IDLE:
            self._idle.append(stream)
        else:
            stream[1].close()
        return answer

    async def _exchange(self, stream: Stream, head: bytes, body: bytes) -> Answer:
        reader, writer = stream
        writer.write(head + body if len(body) < 65536 else head)
        if len(body) >= 65536:
            writer.write(body)
            await writer.drain()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        if "transfer-encoding" in headers:
            content, last = await _chunks(reader)
            headers |= last
            if "x-error" in headers:
                status, _, error = headers["x-error"].partition(" ")
                return Answer(int(status), "application/json", error.encode(), headers)
        else:
            content = await reader.readexactly(_checked(int(headers["content-length"])))
        return Answer(int(lines[0].split(" ", 2)[1]), headers["content-type"], content, headers)

    def interrupt(self) -> None:
        """Requests on their way get no answer: ServiceUnavailable."""
        for writer in self._asking:
            writer.transport.abort()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()


async def connect_unix(path: str, *, limit: int = 1 << 16) -> Stream:
    """Connect, and wait for a place in the listener's queue: asyncio takes a full one for a connection."""
    sock, until = socket.socket(socket.AF_UNIX), time.monotonic() + QUEUE_S
    sock.setblocking(False)
    try:
        while True:
            try:
                sock.connect(path)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(0.01)
        return await asyncio.open_unix_connection(sock=sock, limit=limit)
    except BaseException:
        sock.close()
        raise


async def _chunks(reader: asyncio.StreamReader) -> tuple[bytes, dict[str, str]]:
    """An answer whose length was not known at its beginning, and the headers that came after it."""
    pieces, total = [], 0
    while size := int(await reader.readuntil(b"\r\n"), 16):
        total = _checked(total + size)
        pieces.append(await reader.readexactly(size))
        await reader.readexactly(2)
    last = {}
    while line := (await reader.readuntil(b"\r\n")).decode("latin-1")[:-2]:
        total = _checked(total + len(line))
        name, value = line.split(": ", 1)
        last[name] = value
    return b"".join(pieces), last


def _checked(length: int) -> int:
    if not 0 <= length <= LONGEST_ANSWER:
        raise ValueError(f"an answer of {length} bytes")
    return length


async def until_either(inward: Coroutine[Any, Any, None], outward: Coroutine[Any, Any, None], *, through: str) -> None:
    """Both directions of a connection that something carries, until one ends; what broke it is logged."""
    both = {asyncio.create_task(inward), asyncio.create_task(outward)}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in both:
            one.cancel()
        for ended in await asyncio.gather(*both, return_exceptions=True):
            if isinstance(ended, Exception):
                log.warning("a connection through %s broke: %s: %s", through, type(ended).__name__, ended)
