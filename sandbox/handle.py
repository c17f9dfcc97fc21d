"""Files, processes and shells of one sandbox over HTTP: the part of `RemoteSandbox` that goes through to sandboxd.

Invariant: bytes are checked against the digest that travels with them; what may have happened and must not happen
twice (input, signals) is never sent again.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError

from agentrl.core.errors import AgentRLError, SandboxError
from agentrl.core.types import ExecResult, OutputChunk, ProcessRequest, ProcessView, TerminalSize, Value
from sandbox.following import END_S, RemoteProcess, Stream, follow

T = TypeVar("T")
V = TypeVar("V", bound=Value)
SLACK_S = 30.0
"""Seconds beyond the wait asked for until the answer must be there."""
_views = TypeAdapter(dict[str, tuple[ProcessView, ...]])


def parse(kind: type[V], body: bytes) -> V:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise SandboxError(f"the controller's answer is no {kind.__name__}: {error}") from error


class Caller(Protocol):
    """What a handle needs of the client."""

    async def fetch(self, method: str, path: str, **options: Any) -> httpx.Response: ...

    async def patiently(self, attempt: Callable[[], Awaitable[T]]) -> T: ...


class PassedCalls:
    """Implements the rest of `agentrl.core.protocols.ProcessSandbox`."""

    def __init__(self, caller: Caller, sandbox_id: str) -> None:
        self._caller = caller
        self._id = sandbox_id
        self._path = f"/v1/sandboxes/{sandbox_id}"

    @property
    def id(self) -> str:
        return self._id

    # --- files ---------------------------------------------------------------------------------

    async def read(self, path: str) -> bytes:
        return await self._download("files", {"path": path})

    async def read_range(self, path: str, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset` on; fewer at the file's end."""
        return await self._download("files", {"path": path, "offset": offset, "length": length})

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._upload("files", {"path": path, "mode": mode}, data)

    async def upload_tar(self, path: str, archive: bytes) -> None:
        await self._upload("tar", {"path": path}, archive)

    async def download_tar(self, path: str) -> bytes:
        return await self._download("tar", {"path": path})

    async def _download(self, kind: str, params: dict[str, Any]) -> bytes:
        fetch = self._caller.fetch
        answer = await self._caller.patiently(lambda: fetch("GET", f"{self._path}/{kind}", params=params))
        digest = answer.headers.get("x-sha256")
        if digest is not None and hashlib.sha256(answer.content).hexdigest() != digest:
            raise SandboxError(f"{self._id}: {params['path']} arrived with other bytes than were sent", retryable=True)
        return answer.content

    async def _upload(self, kind: str, params: dict[str, Any], data: bytes) -> None:
        sent, fetch = {**params, "sha256": hashlib.sha256(data).hexdigest()}, self._caller.fetch
        await self._caller.patiently(lambda: fetch("PUT", f"{self._path}/{kind}", params=sent, content=data))

    # --- processes -----------------------------------------------------------------------------

    async def start(self, request: ProcessRequest, *, key: str | None = None) -> ProcessView:
        headers = {"idempotency-key": key or uuid.uuid4().hex, "content-type": "application/json"}
        body, fetch = request.model_dump_json().encode(), self._caller.fetch
        answer = await self._caller.patiently(
            lambda: fetch("POST", f"{self._path}/processes", content=body, headers=headers)
        )
        return parse(ProcessView, answer.content)

    async def processes(self) -> tuple[ProcessView, ...]:
        """Those that run, and the newest that ended."""
        answer = await self._caller.patiently(lambda: self._caller.fetch("GET", f"{self._path}/processes"))
        return _views.validate_json(answer.content)["processes"]

    async def process(self, process_id: str, *, wait_s: float = 0.0) -> ProcessView:
        return parse(ProcessView, await self._look(process_id, "", wait_s, {}))

    async def output(
        self, process_id: str, *, stream: Stream = "stdout", offset: int = 0, wait_s: float = 0.0
    ) -> OutputChunk:
        params = {"stream": stream, "offset": offset}
        return parse(OutputChunk, await self._look(process_id, "/output", wait_s, params))

    async def _look(self, process_id: str, what: str, wait_s: float, params: dict[str, Any]) -> bytes:
        url, sent, fetch = self._process_path(process_id) + what, {**params, "wait_s": wait_s}, self._caller.fetch
        answer = await self._caller.patiently(lambda: fetch("GET", url, params=sent, timeout_s=wait_s + SLACK_S))
        return answer.content

    async def signal(self, process_id: str, number: int) -> ProcessView:
        url = f"{self._process_path(process_id)}/signal"
        return parse(ProcessView, (await self._caller.fetch("POST", url, json={"signal": number})).content)

    async def send_input(self, process_id: str, data: bytes, *, last: bool = False) -> ProcessView:
        url, params = f"{self._process_path(process_id)}/stdin", {"last": int(last)}
        return parse(ProcessView, (await self._caller.fetch("POST", url, params=params, content=data)).content)

    async def resize(self, process_id: str, size: TerminalSize) -> ProcessView:
        """Tell a process on a terminal its new size."""
        url, json, fetch = f"{self._process_path(process_id)}/resize", size.model_dump(), self._caller.fetch
        return parse(ProcessView, (await self._caller.patiently(lambda: fetch("POST", url, json=json))).content)

    def follow(
        self, process_id: str, *, stream: Stream = "stdout", offset: int = 0
    ) -> AsyncGenerator[OutputChunk, None]:
        """What a process wrote from `offset` on, as it comes, to its end."""
        return follow(self, process_id, stream, offset)

    @asynccontextmanager
    async def running(self, request: ProcessRequest, *, key: str | None = None) -> AsyncIterator[RemoteProcess]:
        """A process for the duration of the block: killed on the way out if it still runs.

        `async for piece in process.output()` gives its output as it comes.
        """
        process = RemoteProcess(self, key or uuid.uuid4().hex)
        try:
            await self.start(request, key=process.id)
            yield process
        finally:
            await process.end()

    # --- shells --------------------------------------------------------------------------------

    async def open_shell(
        self, argv: tuple[str, ...] = ("sh",), *, env: Mapping[str, str] | None = None, key: str | None = None
    ) -> RemoteShell:
        """A shell that keeps its state from command to command; it ends with the sandbox at the latest."""
        shell_id = key or uuid.uuid4().hex
        body, fetch = {"argv": argv, "env": dict(env or {})}, self._caller.fetch
        headers = {"idempotency-key": shell_id}
        await self._caller.patiently(lambda: fetch("POST", f"{self._path}/shells", json=body, headers=headers))
        return self._shell(shell_id)

    @asynccontextmanager
    async def shell(
        self, argv: tuple[str, ...] = ("sh",), *, env: Mapping[str, str] | None = None, key: str | None = None
    ) -> AsyncIterator[RemoteShell]:
        """As `open_shell`, for the duration of the block."""
        shell_id = key or uuid.uuid4().hex
        shell = self._shell(shell_id)
        try:
            yield await self.open_shell(argv, env=env, key=shell_id)
        finally:
            await shell.end()

    def _shell(self, shell_id: str) -> RemoteShell:
        return RemoteShell(self._caller, f"{self._path}/shells/{quote(shell_id, safe='')}")

    def _process_path(self, process_id: str) -> str:
        return f"{self._path}/processes/{quote(process_id, safe='')}"


class RemoteShell:
    """One shell. A command that times out ends it, as does `exit`: SandboxError then says so, with `ran=no`."""

    def __init__(self, caller: Caller, path: str) -> None:
        self._caller, self._path = caller, path

    async def run(
        self, command: str, *, timeout_s: float = 30.0, cap_bytes: int = 1 << 20, key: str | None = None
    ) -> ExecResult:
        """Run a command line, one at a time (Conflict otherwise). A replayed key gets the stored result."""
        body, fetch = {"command": command, "timeout_s": timeout_s, "cap_bytes": cap_bytes}, self._caller.fetch
        headers, params = {"idempotency-key": key or uuid.uuid4().hex}, {"wait_s": timeout_s}
        answer = await self._caller.patiently(
            lambda: fetch(
                "POST", f"{self._path}/exec", json=body, headers=headers, params=params, timeout_s=timeout_s + SLACK_S
            )
        )
        return parse(ExecResult, answer.content)

    async def close(self) -> None:
        """Kill it and what it started."""
        headers = {"idempotency-key": uuid.uuid4().hex}
        await self._caller.patiently(lambda: self._caller.fetch("POST", f"{self._path}/close", headers=headers))

    async def end(self) -> None:
        """As `close`, as far as it can be reached: what cannot, the sandbox's own end kills."""
        with suppress(AgentRLError, TimeoutError):
            async with asyncio.timeout(END_S):
                await self.close()
