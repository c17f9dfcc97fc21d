"""The local backend: drives the fork server over its socket. Constructed by `sandbox.api`; called by `controller`.

Invariant: one fork server a folder (it holds a lock there); one left by a killed controller is taken over, with
its sandboxes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError, Ran, SandboxError, Unsupported
from agentrl.core.types import SandboxSpec
from sandbox.backends.base import Ended, Inventory
from sandbox.backends.local.birth import EGRESS, PROXY
from sandbox.backends.local.peers import SOCKET
from sandbox.channel import Channel, Stream, connect_unix
from sandbox.egress import EgressProxy, environment

log = logging.getLogger(__name__)

LINE = 64 << 20
"""Longest answer of the fork server, in bytes: an inventory of everything."""
ASK_S = 60.0
"""How long the fork server may take to answer."""


class LocalBackend:
    """Sandboxes as forks on this machine."""

    def __init__(
        self,
        folder: Path,
        *,
        require_isolation: bool = False,
        require_cgroups: bool = False,
        idle_s: float = 60.0,
        ask_s: float = ASK_S,
        egress: EgressProxy | None = None,
    ) -> None:
        self.folder = folder
        self._egress = egress
        self.isolation = "unknown"
        self._require_isolation, self._require_cgroups = require_isolation, require_cgroups
        self._idle_s, self._ask_s = idle_s, ask_s
        self._folder_fd = -1
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._seq = 0
        self._placed: set[str] = set()
        self._ended: Ended = lambda sandbox_id, cause: None
        self._connecting = asyncio.Lock()

    async def start(self, ended: Ended) -> None:
        self._ended = ended
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Reached through the descriptor, a socket's address stays short however long the folder's path is.
        self._folder_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        await self._connect()
        hello = await self._ask("list")
        self._placed = set(hello["live"])
        try:
            self._judge(hello["why_not"], hello["why_no_cgroups"])
            if self._egress is not None:
                (self.folder / EGRESS).mkdir(exist_ok=True)
                await self._egress.start(f"/proc/self/fd/{self._folder_fd}/{EGRESS}/{PROXY}")
        except BaseException:
            await self.stop()
            raise

    def _judge(self, why_not: str, why_no_cgroups: str) -> None:
        """Say loudly what this kernel does not give us, or refuse to go on without it."""
        self.isolation = "none" if why_not else "namespaces, no cgroups" if why_no_cgroups else "namespaces"
        if why_no_cgroups and self._require_cgroups:
            raise ConfigError(
                f"sandbox.require_cgroups is set, but there are none ({why_no_cgroups}): "
                "run as root, or have a cgroup delegated to this user, or use the docker backend"
            )
        if why_no_cgroups:
            log.warning(
                "SANDBOXES HAVE NO CGROUPS (%s): memory is limited for each process only, CPU not at all, and a kill "
                "for lack of memory is reported as SIGNALED. Set sandbox.require_cgroups to refuse this.",
                why_no_cgroups,
            )
        if why_not and self._egress is not None:
            raise ConfigError(f"sandbox.egress needs namespaces, and this kernel allows none ({why_not})")
        if why_not and self._require_isolation:
            raise ConfigError(
                f"sandbox.require_isolation is set, but this kernel allows no namespaces ({why_not}): "
                "run as root or allow unprivileged user namespaces, or use the docker backend"
            )
        if why_not:
            log.warning(
                "SANDBOXES ARE NOT ISOLATED: this kernel allows no namespaces (%s). Commands run as this user, with "
                "the network and with every file this user can read. Set sandbox.require_isolation to refuse this.",
                why_not,
            )

    async def _connect(self) -> None:
        async with self._connecting:
            if self._writer is not None:
                return
            try:
                reader, writer = await self._open(SOCKET)
            except OSError:
                await self._launch()
                reader, writer = await self._open(SOCKET)
            self._writer = writer
            self._reading = asyncio.create_task(self._read(reader), name="fork-server")

    async def _launch(self) -> None:
        environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        with (self.folder / "forkserver.log").open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "sandbox.backends.local.forkserver", ".", str(self._idle_s),
                cwd=self.folder, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        if await process.wait() != 0:
            log_end = (self.folder / "forkserver.log").read_text(errors="replace")[-2000:]
            raise SandboxError(f"the fork server in {self.folder} did not start: {log_end}", ran=Ran.NO)

    async def _open(self, name: str) -> Stream:
        return await connect_unix(f"/proc/self/fd/{self._folder_fd}/{name}", limit=LINE)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if "seq" not in message:
                    self._placed.discard(message["ended"])
                    self._ended(message["ended"], message["cause"])
                elif (waiter := self._asked.pop(message["seq"], None)) is not None and not waiter.done():
                    waiter.set_result(message)
        except OSError as error:
            log.warning("the connection to the fork server broke: %s", error)
        finally:
            self._disconnected()

    def _disconnected(self) -> None:
        """The fork server is gone, and by its invariant so are its sandboxes."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        asked, self._asked = self._asked, {}
        for waiter in asked.values():
            if not waiter.done():
                waiter.set_exception(SandboxError("the fork server ended", ran=Ran.MAYBE))
        placed, self._placed = self._placed, set()
        for sandbox_id in placed:
            self._ended(sandbox_id, "the fork server ended")

    async def _ask(self, op: str, **fields: Any) -> dict[str, Any]:
        await self._connect()
        assert self._writer is not None
        self._seq += 1
        waiter: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[self._seq] = waiter
        seq = self._seq
        self._writer.write(json.dumps({"seq": seq, "op": op, **fields}).encode() + b"\n")
        try:
            async with asyncio.timeout(self._ask_s):
                answer = await waiter
        except TimeoutError:
            message = (
                f"the fork server has not answered {op!r} for {self._ask_s:.0f} s: look at its log in {self.folder}"
            )
            raise SandboxError(message, ran=Ran.MAYBE, retryable=True) from None
        finally:
            self._asked.pop(seq, None)
        if answer.get("error"):
            raise SandboxError(f"local backend, {op} {fields.get('id', '')}: {answer['error']}", ran=Ran.NO)
        return answer

    async def create(self, sandbox_id: str, spec: SandboxSpec, owner: str) -> None:
        if spec.image:
            raise Unsupported(f"the local backend has no images, but the spec asks for {spec.image!r}")
        env = spec.env if self._egress is None else {**environment(), **spec.env}
        asked = spec.model_dump() | {"env": dict(env), "egress": self._egress is not None}
        await self._ask("create", id=sandbox_id, spec=asked)
        self._placed.add(sandbox_id)

    async def destroy(self, sandbox_id: str) -> None:
        self._placed.discard(sandbox_id)
        await self._ask("destroy", id=sandbox_id)

    async def inventory(self) -> Inventory:
        answer = await self._ask("list")
        paused = frozenset(answer["paused"])
        return Inventory(live=frozenset(answer["live"]), ended=answer["ended"], paused=paused)

    def channel(self, sandbox_id: str) -> Channel:
        return Channel(sandbox_id, lambda: self._open(f"{sandbox_id}.sock"))

    async def pause(self, sandbox_id: str) -> None:
        await self._ask("pause", id=sandbox_id)

    async def resume(self, sandbox_id: str) -> None:
        await self._ask("resume", id=sandbox_id)

    async def snapshot(self, sandbox_id: str, snapshot_id: str) -> None:
        await self._ask("snapshot", id=sandbox_id, snapshot=snapshot_id)

    async def forget_snapshot(self, snapshot_id: str) -> None:
        await self._ask("forget", snapshot=snapshot_id)

    async def snapshots(self) -> frozenset[str]:
        return frozenset(path.name.partition(".")[0] for path in (self.folder / "snapshots").glob("*.tar*"))

    async def stop(self) -> None:
        self._placed = set()
        try:
            if self._writer is not None:
                await self._ask("shutdown")
                if self._reading is not None:
                    # It closes the connection when it ends, which is when nothing is left.
                    await asyncio.wait({self._reading}, timeout=self._ask_s)
        finally:
            await self.detach()

    async def detach(self) -> None:
        """Let go of the fork server and its sandboxes; their leases run on."""
        self._placed = set()
        if self._egress is not None:
            await self._egress.close()
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            await self._reading
        os.close(self._folder_fd)
