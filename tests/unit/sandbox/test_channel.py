"""The way to a sandboxd that is not one: whatever it says is an error that leaves open whether the request ran."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from agentrl.core.errors import Ran, ServiceUnavailable
from sandbox.channel import KEPT_IDLE, LONGEST_ANSWER, Channel, connect_unix

Says = Callable[[bytes], Awaitable[Channel]]


@pytest.fixture
async def says() -> AsyncIterator[Says]:
    """A channel to somebody who answers everything with the same bytes."""
    servers: list[asyncio.Server] = []

    async def serve(answer: bytes) -> Channel:
        async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            writer.close()

        servers.append(await asyncio.start_server(answered, "127.0.0.1", 0))
        port = servers[-1].sockets[0].getsockname()[1]
        return Channel("sb-1", lambda: asyncio.open_connection("127.0.0.1", port))

    yield serve
    for server in servers:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 -\r\n",
        b"hello\r\n\r\n",
        b"HTTP/1.1 two -\r\ncontent-length: 0\r\ncontent-type: x\r\n\r\n",
        b"HTTP/1.1 200 -\r\ncontent-length: many\r\ncontent-type: x\r\n\r\n",
        b"HTTP/1.1 200 -\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 -\r\nheader without a colon\r\n\r\n",
        f"HTTP/1.1 200 -\r\ncontent-length: {LONGEST_ANSWER + 1}\r\ncontent-type: x\r\n\r\n".encode(),
        bytes(1 << 20),
        b"HTTP/1.1 200 -\r\ncontent-type: x\r\ntransfer-encoding: chunked\r\n\r\nmany\r\n",
        b"HTTP/1.1 200 -\r\ncontent-type: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n-1\r\n",
        b"HTTP/1.1 200 -\r\ncontent-type: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n",
        b"HTTP/1.1 200 -\r\ncontent-type: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-error: no {}\r\n\r\n",
    ],
)
async def test_what_is_no_answer_may_have_run(says: Says, answer: bytes) -> None:
    channel = await says(answer)
    with pytest.raises(ServiceUnavailable, match="sandboxd of sb-1: no answer to POST /exec") as unknown:
        await channel.request("POST", "/exec?key=secret")
    assert unknown.value.ran is Ran.MAYBE
    channel.close()


async def test_a_burst_of_requests_leaves_few_connections(tmp_path: Path) -> None:
    begun, opened, lasting = asyncio.Event(), 0, 0

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened, lasting
        opened, lasting = opened + 1, lasting + 1
        if opened == 3 * KEPT_IDLE:
            begun.set()
        while await reader.read(1 << 16):
            await begun.wait()
            writer.write(b"HTTP/1.1 200 -\r\ncontent-type: x\r\ncontent-length: 0\r\n\r\n")
        writer.close()
        lasting -= 1
        async with ended:
            ended.notify_all()

    ended = asyncio.Condition()
    async with await asyncio.start_unix_server(answered, tmp_path / "s"):
        channel = Channel("sb-1", lambda: connect_unix(str(tmp_path / "s")))
        await asyncio.gather(*(channel.request("GET", "/health") for _ in range(3 * KEPT_IDLE)))
        async with ended:
            await ended.wait_for(lambda: lasting == KEPT_IDLE)
        await channel.request("GET", "/health")
        assert (opened, lasting) == (3 * KEPT_IDLE, KEPT_IDLE)
        channel.close()
        async with ended:
            await ended.wait_for(lambda: lasting == 0)


async def test_who_cannot_be_reached_ran_nothing() -> None:
    async def refuse() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        raise ConnectionRefusedError("nobody listens")

    with pytest.raises(ServiceUnavailable, match="cannot connect") as refused:
        await Channel("sb-1", refuse).request("GET", "/health")
    assert refused.value.ran is Ran.NO
