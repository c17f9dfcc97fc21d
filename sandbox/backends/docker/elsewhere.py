"""Sandboxes of an engine that sees nothing of this machine: the runtime comes in a volume, and commands by the engine's
exec API, to a process beside sandboxd that carries the bytes (`sandbox.runtime.carry`). Used by `backend`.

Invariants: a volume under its name is whole before any container has it; what keeps a connection from being made is an
OSError, before any byte of a request was sent.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import secrets
import socket
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agentrl.core.errors import SandboxError
from agentrl.core.types import SandboxSpec
from sandbox.backends.docker.container import CONTROLLER, RUNTIME, Start
from sandbox.backends.docker.engine import Engine, is_absent, is_busy
from sandbox.backends.docker.hijack import Program, started
from sandbox.channel import Stream, until_either
from sandbox.runtime.carry import READY
from sandbox.runtime.handoff import TOKEN
from sandbox.runtime.interpreter import LOADER, SEALED, command

log = logging.getLogger(__name__)

PORT = 4170
"""Where sandboxd serves, on the loopback of its container."""
CARRY = f"from sandbox.runtime.carry import main; main({PORT})"
ALONE = "from sandbox.runtime.handoff import alone; alone()"
KEPT = "agentrl.runtime"
"""Label of the volume, and of the container by which it is filled: whose they are."""
WHOLE = "whole"
"""The file that is put into a volume last."""
CONNECT_S = 15.0

Pull = Callable[[str], Awaitable[None]]


class Elsewhere:
    """What one controller has at such an engine. `close` ends its connections."""

    def __init__(self, engine: Engine, controller: str, runtime: Path, folder: Path) -> None:
        self._engine, self._controller, self._runtime, self._folder = engine, controller, runtime, folder
        self.volume = f"agentrl-{controller[:12]}-{runtime.name}"
        self._filling = asyncio.Lock()
        self._filled = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, sandbox_id: str, spec: SandboxSpec, image: str, pull: Pull) -> Start:
        """How a container of `image` begins."""
        async with self._filling:
            if not (self._filled and await self._exists()):
                await self._fill(image, pull)
                self._filled = True
        token = secrets.token_urlsafe(24)
        path = self._folder / f"{sandbox_id}.token"
        path.touch(mode=0o600)
        path.write_text(token)
        config = {
            "host": "127.0.0.1",
            "port": PORT,
            "workdir": spec.workdir,
            "ttl_s": spec.ttl_s,
            "env": dict(spec.env),
        }
        return Start((self._mount(read_only=True),), ALONE, json.dumps(config), {TOKEN: token})

    def token(self, sandbox_id: str) -> str:
        path = self._folder / f"{sandbox_id}.token"
        return path.read_text() if path.exists() else ""

    def _mount(self, *, read_only: bool) -> dict[str, Any]:
        # An engine makes a volume that it lacks: without NoCopy, of what an image brings in that place.
        options = {"NoCopy": True, "Labels": {KEPT: self._controller}}
        return {
            "Type": "volume", "Source": self.volume, "Target": RUNTIME, "ReadOnly": read_only, "VolumeOptions": options,
        }  # fmt: skip

    async def _exists(self) -> bool:
        """Somebody may have pruned what no container used."""
        try:
            await self._engine.call("inspect_volume", self.volume)
        except SandboxError as error:
            if is_absent(error):
                return False
            raise
        return True

    async def _fill(self, image: str, pull: Pull) -> None:
        """By a container that is never started: the engine unpacks an archive into its volume."""
        body = {
            "Image": image,
            "Cmd": ["none"],
            # A snapshot's image says whose it is: this is no sandbox.
            "Labels": {KEPT: self._controller, CONTROLLER: ""},
            "HostConfig": {"Mounts": [self._mount(read_only=False)], "NetworkMode": "none"},
        }
        try:
            made = await self._engine.call("create_container_from_config", body)
        except SandboxError as error:
            if not is_absent(error):
                raise
            await pull(image)
            made = await self._engine.call("create_container_from_config", body)
        try:
            if not await self._is_whole(made["Id"]):
                data = await asyncio.to_thread(_archive, self._runtime)
                await self._engine.call("put_archive", made["Id"], RUNTIME, data)
                log.info("the runtime, of %d MB, was sent to the engine at %s", len(data) >> 20, self._engine.host)
        finally:
            await self._engine.call("remove_container", made["Id"], force=True, v=True)

    async def _is_whole(self, container: str) -> bool:
        try:
            await self._engine.stream("get_archive", lambda piece: None, container, f"{RUNTIME}/{WHOLE}")
        except SandboxError as error:
            if is_absent(error):
                return False
            raise
        return True

    # --- connections ---------------------------------------------------------------------------

    async def connect(self, container: str) -> Stream:
        near, far = socket.socketpair()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._carry(container, await asyncio.open_connection(sock=far), ready))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            async with asyncio.timeout(CONNECT_S):
                await ready
        except BaseException:
            task.cancel()
            near.close()
            raise
        return await asyncio.open_connection(sock=near)

    async def _carry(self, container: str, far: Stream, ready: asyncio.Future[None]) -> None:
        """Until either end closes."""
        reader, writer = far
        try:
            words = command(RUNTIME, CARRY, sealed=True)
            # The token is no business of its environment.
            async with started(self._engine, container, words, env={TOKEN: ""}) as program:
                writer.write(await _connected(program))
                if ready.cancelled():
                    return
                ready.set_result(None)
                await _both(program, reader, writer)
        except (OSError, SandboxError) as error:
            if not ready.done():
                ready.set_exception(ConnectionError(f"exec: {error}"))
        finally:
            writer.transport.abort()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def forget(engine: Engine, controller: str, *, but: str = "") -> None:
    """Remove what this controller has at an engine for its runtime, such as that of an earlier version: all that no
    container uses, except one volume."""

    async def remove(method: str, name: str, **options: Any) -> None:
        try:
            await engine.call(method, name, **options)
        except SandboxError as error:
            if not (is_absent(error) or is_busy(error)):
                raise

    mine = {"label": f"{KEPT}={controller}"}
    # By these a controller that was killed was filling a volume.
    for container in await engine.call("containers", all=True, filters=mine):
        await remove("remove_container", container["Id"], force=True, v=True)
    for volume in (await engine.call("volumes", mine))["Volumes"] or ():
        if volume["Name"] != but:
            await remove("remove_volume", volume["Name"])


async def _connected(program: Program) -> bytes:
    """Wait until the other end is connected; what it sent beyond that. ConnectionError when it never will be."""
    said = b""
    while (piece := await program.read()) is not None:
        if piece[0] == 1:
            return piece[1][len(READY) :]
        said += piece[1]
    raise ConnectionError(said.decode(errors="replace").strip()[-500:] or "it ended without a word")


async def _both(program: Program, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async def inward() -> None:
        while data := await reader.read(1 << 16):
            await program.write(data)

    async def outward() -> None:
        while (piece := await program.read()) is not None:
            if piece[0] == 1:
                writer.write(piece[1])
                await writer.drain()

    await until_either(inward(), outward(), through="the engine")


def _archive(runtime: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(runtime, arcname=".", filter=_as_root)
        # We may not read it either, but what it is a copy of.
        sealed, loader = tarfile.TarInfo(SEALED), (runtime / LOADER).read_bytes()
        sealed.size, sealed.mode = len(loader), 0o111
        archive.addfile(sealed, io.BytesIO(loader))
        archive.addfile(tarfile.TarInfo(WHOLE))
    return buffer.getvalue()


def _as_root(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if member.name == f"./{SEALED}":
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
