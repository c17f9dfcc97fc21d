"""A program in a running container, with its streams: the engine's exec API over a connection of its own. Used by
`elsewhere`.

The `docker` package reads such a connection beneath its own buffer and may lose the first bytes, so it is spoken here.
Invariant: a connection belongs to one program and is closed with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from agentrl.core.errors import Ran, SandboxError
from sandbox.backends.docker.engine import Engine
from sandbox.channel import Stream


class Program:
    """One that was started, and its streams."""

    def __init__(self, stream: Stream) -> None:
        self._reader, self._writer = stream

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def read(self) -> tuple[int, bytes] | None:
        """The next piece and which stream it is of, 1 or 2; None at the end of both."""
        try:
            head = await self._reader.readexactly(8)
            return head[0], await self._reader.readexactly(int.from_bytes(head[4:], "big"))
        except (OSError, EOFError):
            return None


@asynccontextmanager
async def started(
    engine: Engine, container: str, argv: Sequence[str], *, env: Mapping[str, str]
) -> AsyncIterator[Program]:
    """Execute `argv` in a container. SandboxError (ran=no) when the engine refuses, as for one that is not running."""
    options = {"stdin": True, "environment": dict(env)}
    made = await engine.call("exec_create", container, list(argv), ran=Ran.NO, **options)
    try:
        reader, writer = await dial(engine)
    except OSError as error:
        raise SandboxError(f"the Docker Engine at {engine.host} takes no connection: {error}", ran=Ran.NO) from error
    try:
        await _upgrade(engine, made["Id"], reader, writer)
        yield Program((reader, writer))
    finally:
        # Not closed in order: input that nobody reads would be waited for.
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _upgrade(engine: Engine, exec_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    body = b'{"Detach": false, "Tty": false}'
    head = (
        f"POST /v{engine.version}/exec/{exec_id}/start HTTP/1.1\r\nhost: docker\r\nconnection: Upgrade\r\n"
        f"upgrade: tcp\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ", 2)[1])
        if status in (101, 200):
            return
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        said = await reader.readexactly(int(headers.get("content-length", "0")))
    except (OSError, EOFError, ValueError) as error:
        raise SandboxError(f"the Docker Engine at {engine.host} broke off the start of a command: {error}") from error
    message = json.loads(said).get("message", "") if said.startswith(b"{") else said.decode(errors="replace")
    ran = Ran.NO if status in (404, 409) else Ran.MAYBE
    raise SandboxError(f"Docker, exec: {message}", ran=ran, detail={"docker_status": status})


async def dial(engine: Engine) -> Stream:
    """A connection to the engine."""
    url = urlsplit(engine.host)
    if url.scheme == "unix":
        return await asyncio.open_unix_connection(url.netloc + url.path)
    if url.scheme == "ssh":
        return await _dial_ssh(f"ssh://{url.netloc}")
    folder = os.environ.get("DOCKER_CERT_PATH", "") if engine.tls else ""
    context = None
    if folder:
        context = ssl.create_default_context(cafile=os.path.join(folder, "ca.pem"))
        context.load_cert_chain(os.path.join(folder, "cert.pem"), os.path.join(folder, "key.pem"))
    return await asyncio.open_connection(url.hostname, url.port or (2376 if context else 2375), ssl=context)


async def _dial_ssh(url: str) -> Stream:
    # As a URL, since the port would be taken for a part of the name otherwise.
    command, pipe = ("ssh", "--", url, "docker", "system", "dial-stdio"), asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdout, process.stdin
