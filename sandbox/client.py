"""The controller's client: `agentrl.core.protocols.Sandboxes` over HTTP. Constructed by `launch`.

Invariants: whatever happens inside `acquire`, also a cancellation at any await, the sandbox is closed; a command is
sent again only when it certainly did not run, and otherwise asked for by its key. A controller that restarts
within `patience_s` is waited for.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from agentrl.core.errors import AgentRLError, NotFound, Ran, SandboxError, SandboxLost, ServiceUnavailable
from agentrl.core.http import Service
from agentrl.core.types import ExecRequest, ExecResult, SandboxSpec, SandboxState, SandboxView, Value

log = logging.getLogger(__name__)

T = TypeVar("T")
V = TypeVar("V", bound=Value)
RELEASE_S = 5.0
"""How long the end of `acquire` waits for a close; what takes longer goes on in the background."""
SLACK_S = 15.0
"""Seconds beyond a command's timeout in which its answer must come."""
_views = TypeAdapter(dict[str, tuple[SandboxView, ...]])


class RemoteSandbox:
    """A handle to one sandbox; holds nothing but its id."""

    def __init__(self, client: SandboxClient, sandbox_id: str) -> None:
        self._client = client
        self._id = sandbox_id
        self._path = f"/v1/sandboxes/{sandbox_id}"

    @property
    def id(self) -> str:
        return self._id

    async def exec(self, request: ExecRequest, *, key: str | None = None) -> ExecResult:
        key = key or uuid.uuid4().hex
        body = request.model_dump_json().encode()
        timeout_s = request.timeout_s + SLACK_S
        sent_in_vain = True

        async def attempt() -> ExecResult:
            nonlocal sent_in_vain
            if not sent_in_vain:
                try:
                    found = await self._client.send(
                        "GET", f"{self._path}/exec", params={"key": key}, timeout_s=timeout_s
                    )
                    return parse(ExecResult, found)
                except NotFound:
                    sent_in_vain = True
            try:
                headers = {"idempotency-key": key, "content-type": "application/json"}
                answer = await self._client.send(
                    "POST", f"{self._path}/exec", content=body, headers=headers, timeout_s=timeout_s
                )
            except ServiceUnavailable as error:
                sent_in_vain = error.ran is Ran.NO
                raise
            return parse(ExecResult, answer)

        return await self._client.patiently(attempt)

    async def read(self, path: str) -> bytes:
        return await self._client.patiently(
            lambda: self._client.send("GET", f"{self._path}/files", params={"path": path})
        )

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        params = {"path": path, "mode": str(mode)}
        await self._client.patiently(
            lambda: self._client.send("PUT", f"{self._path}/files", params=params, content=data)
        )

    async def renew(self, ttl_s: float) -> None:
        await self._client.patiently(lambda: self._client.send("POST", f"{self._path}/renew", json={"ttl_s": ttl_s}))

    async def close(self) -> None:
        try:
            await self._client.patiently(lambda: self._client.send("DELETE", self._path))
        except NotFound:
            log.debug("sandbox %s was forgotten before it was closed", self._id)


class SandboxClient:
    """The controller at `base_url`."""

    def __init__(self, base_url: str, *, token: str = "", patience_s: float = 20.0) -> None:
        self._service = Service(base_url, token=token)
        self._patience_s = patience_s
        self._releases: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def acquire(self, spec: SandboxSpec, *, owner: str, key: str) -> AsyncIterator[RemoteSandbox]:
        try:
            view = await self._create(spec, owner, key)
        except BaseException as error:
            # Refused before anything was made: the key stays free for another try.
            if not (isinstance(error, AgentRLError) and error.ran is Ran.NO):
                await self._release(self._close_key(owner, key))
            raise
        sandbox = RemoteSandbox(self, view.id)
        try:
            yield sandbox
        finally:
            await self._release(sandbox.close())

    async def _create(self, spec: SandboxSpec, owner: str, key: str) -> SandboxView:
        json = {"owner": owner, "spec": spec.model_dump(mode="json")}
        headers = {"idempotency-key": key}
        answer = await self.patiently(lambda: self.send("POST", "/v1/sandboxes", json=json, headers=headers))
        view = parse(SandboxView, answer)
        if view.state is not SandboxState.READY:
            raise SandboxLost(
                f"key {key!r} names sandbox {view.id}, which is {view.state} ({view.cause}): take a fresh key",
                ran=Ran.NO,
            )
        return view

    async def get(self, sandbox_id: str) -> RemoteSandbox:
        answer = await self.patiently(lambda: self.send("GET", f"/v1/sandboxes/{sandbox_id}"))
        view = parse(SandboxView, answer)
        if view.state in (SandboxState.CLOSED, SandboxState.FAILED, SandboxState.LOST, SandboxState.CLOSING):
            raise SandboxLost(f"sandbox {sandbox_id} is {view.state}: {view.cause}", ran=Ran.NO)
        return RemoteSandbox(self, view.id)

    async def list(self, *, owner: str | None = None, live: bool = True) -> Sequence[SandboxView]:
        params = {"live": str(live).lower()} | ({} if owner is None else {"owner": owner})
        return _views.validate_json(await self.patiently(lambda: self.send("GET", "/v1/sandboxes", params=params)))[
            "sandboxes"
        ]

    async def _close_key(self, owner: str, key: str) -> None:
        params = {"owner": owner, "key": key}
        await self.patiently(lambda: self.send("DELETE", "/v1/sandboxes", params=params))

    async def _release(self, closing: Awaitable[None]) -> None:
        """Close also when we are being cancelled; what the controller does not answer in time, its lease ends."""

        async def run() -> None:
            try:
                await closing
            except AgentRLError as error:
                log.warning("a sandbox was not closed, its lease will end it: %s", error.message)

        task = asyncio.create_task(run())
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        await asyncio.wait({task}, timeout=RELEASE_S)

    async def send(self, method: str, path: str, **options: Any) -> bytes:
        return (await self._service.request(method, path, **options)).content

    async def patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an attempt that is safe to repeat while the controller is away."""
        deadline, pause = time.monotonic() + self._patience_s, 0.05
        while True:
            try:
                return await attempt()
            except ServiceUnavailable:
                if time.monotonic() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def close(self) -> None:
        if self._releases:
            await asyncio.wait(self._releases)
        await self._service.close()


def parse(kind: type[V], body: bytes) -> V:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise SandboxError(f"the controller's answer is no {kind.__name__}: {error}") from error
