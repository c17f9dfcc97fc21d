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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter

from agentrl.core.errors import AgentRLError, Conflict, NotFound, Ran, SandboxLost, ServiceUnavailable
from agentrl.core.http import Service
from agentrl.core.types import ExecRequest, ExecResult, SandboxSpec, SandboxState, SandboxView, Snapshot
from sandbox.handle import PassedCalls, parse
from sandbox.views import CommandView, EventPage, Swept

log = logging.getLogger(__name__)

T = TypeVar("T")
RELEASE_S = 5.0
"""How long the end of `acquire` waits for a close; what takes longer goes on in the background."""
SLACK_S = 15.0
"""Seconds beyond a command's timeout in which its answer must come."""
RESULT_S = 3600.0
"""How long to wait for the result of a command that still runs."""
SNAPSHOT_S = 600.0
"""How long to wait for a snapshot."""
FORK_S = 600.0
"""How long the snapshot of a fork is kept if we cannot end it."""
_views = TypeAdapter(dict[str, tuple[SandboxView, ...]])
_snapshots = TypeAdapter(dict[str, tuple[Snapshot, ...]])
_commands = TypeAdapter(dict[str, tuple[CommandView, ...]])


class RemoteSandbox(PassedCalls):
    """A handle to one sandbox; holds nothing but its id."""

    def __init__(self, client: SandboxClient, sandbox_id: str) -> None:
        super().__init__(client, sandbox_id)
        self._client = client

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
                except Conflict as paused:
                    # Asking did nothing, but what was sent before may have run.
                    paused.ran = Ran.MAYBE
                    raise
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

    async def result(self, key: str) -> ExecResult:
        """The result of an earlier command by its key; waits while it runs. NotFound when no such command came."""
        send = self._client.send
        answer = await self._client.patiently(
            lambda: send("GET", f"{self._path}/exec", params={"key": key}, timeout_s=RESULT_S)
        )
        return parse(ExecResult, answer)

    async def commands(self) -> Sequence[CommandView]:
        """The newest commands that this controller passed on, oldest first."""
        answer = await self._client.patiently(lambda: self._client.send("GET", f"{self._path}/commands"))
        return _commands.validate_json(answer)["commands"]

    async def renew(self, ttl_s: float) -> None:
        await self._client.patiently(lambda: self._client.send("POST", f"{self._path}/renew", json={"ttl_s": ttl_s}))

    async def pause(self, *, ttl_s: float | None = None, key: str | None = None) -> None:
        await self._do("pause", {"ttl_s": ttl_s}, key)

    async def resume(self, *, key: str | None = None) -> None:
        await self._do("resume", {}, key)

    async def snapshot(self, *, ttl_s: float = 3600.0, key: str | None = None) -> Snapshot:
        return parse(Snapshot, await self._do("snapshots", {"ttl_s": ttl_s}, key, timeout_s=SNAPSHOT_S))

    async def _do(self, verb: str, json: Mapping[str, Any], key: str | None, *, timeout_s: float = 60.0) -> bytes:
        headers, send = {"idempotency-key": key or uuid.uuid4().hex}, self._client.send
        return await self._client.patiently(
            lambda: send("POST", f"{self._path}/{verb}", json=json, headers=headers, timeout_s=timeout_s)
        )

    @asynccontextmanager
    async def fork(self, *, key: str | None = None) -> AsyncIterator[RemoteSandbox]:
        """Another sandbox of the same owner and spec, with the files of now: a snapshot and an `acquire`."""
        key, client = key or uuid.uuid4().hex, self._client
        view = await client.view(self._id)
        kept = await self.snapshot(ttl_s=FORK_S, key=key)
        try:
            spec = view.spec.model_copy(update={"snapshot": kept.id, "files": {}})
            async with client.acquire(spec, owner=view.owner, key=key) as fork:
                yield fork
        finally:
            await client.release(client.forget_snapshot(kept.id))

    async def close(self) -> None:
        try:
            await self._client.patiently(lambda: self._client.send("DELETE", self._path))
        except NotFound:
            log.debug("sandbox %s was forgotten before it was closed", self._id)


class SandboxClient:
    """The controller at `base_url`, or the leader of several, separated by commas."""

    def __init__(self, base_url: str, *, token: str = "", patience_s: float = 20.0) -> None:
        self._urls, self._token = base_url.split(","), token
        self._services: dict[str, Service] = {}
        self._url = self._urls[0]
        """Who is asked: the leader as far as we know."""
        self._patience_s = patience_s
        self._releases: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def acquire(self, spec: SandboxSpec, *, owner: str, key: str) -> AsyncIterator[RemoteSandbox]:
        try:
            view = await self.create(spec, owner=owner, key=key)
        except BaseException as error:
            # Refused before anything was made: the key stays free for another try.
            if not (isinstance(error, AgentRLError) and error.ran is Ran.NO):
                await self.release(self._close_key(owner, key))
            raise
        sandbox = RemoteSandbox(self, view.id)
        try:
            yield sandbox
        finally:
            await self.release(sandbox.close())

    @asynccontextmanager
    async def acquire_group(
        self, specs: Mapping[str, SandboxSpec], *, owner: str
    ) -> AsyncIterator[Mapping[str, RemoteSandbox]]:
        """READY sandboxes by key, all or none, as with `acquire`. Those of a group that failed need fresh keys."""
        members = {key: spec.model_dump(mode="json") for key, spec in specs.items()}
        json = {"owner": owner, "members": members}
        try:
            answer = await self.patiently(lambda: self.send("POST", "/v1/groups", json=json))
            views = _views.validate_json(answer)["sandboxes"]
            made = {key: self._ready(view, key) for key, view in zip(specs, views, strict=True)}
        except BaseException as error:
            if not (isinstance(error, AgentRLError) and error.ran is Ran.NO):
                await self.release(_together(self._close_key(owner, key) for key in specs))
            raise
        try:
            yield made
        finally:
            await self.release(_together(sandbox.close() for sandbox in made.values()))

    async def create(self, spec: SandboxSpec, *, owner: str, key: str) -> SandboxView:
        """A READY sandbox that nobody closes but its lease: for callers that cannot hold `acquire` open."""
        json = {"owner": owner, "spec": spec.model_dump(mode="json")}
        headers = {"idempotency-key": key}
        answer = await self.patiently(lambda: self.send("POST", "/v1/sandboxes", json=json, headers=headers))
        view = parse(SandboxView, answer)
        self._ready(view, key)
        return view

    def _ready(self, view: SandboxView, key: str) -> RemoteSandbox:
        if view.state is not SandboxState.READY:
            raise SandboxLost(
                f"key {key!r} names sandbox {view.id}, which is {view.state} ({view.cause}): take a fresh key",
                ran=Ran.NO,
            )
        return RemoteSandbox(self, view.id)

    async def get(self, sandbox_id: str) -> RemoteSandbox:
        view = await self.view(sandbox_id)
        if view.state in (SandboxState.CLOSED, SandboxState.FAILED, SandboxState.LOST, SandboxState.CLOSING):
            raise SandboxLost(f"sandbox {sandbox_id} is {view.state}: {view.cause}", ran=Ran.NO)
        return RemoteSandbox(self, view.id)

    async def view(self, sandbox_id: str) -> SandboxView:
        """What the controller knows of a sandbox, in whatever state it is."""
        return parse(SandboxView, await self.patiently(lambda: self.send("GET", f"/v1/sandboxes/{sandbox_id}")))

    def handle(self, sandbox_id: str) -> RemoteSandbox:
        """A handle without a look at the sandbox: also to one that ended."""
        return RemoteSandbox(self, sandbox_id)

    async def events(self, after: int = 0, *, wait_s: float = 0.0) -> EventPage:
        """Changes of state after a cursor; `wait_s` waits for the next one. Ask again from `cursor`."""
        params = {"after": str(after), "wait": str(wait_s)}
        answer = await self.patiently(lambda: self.send("GET", "/v1/events", params=params, timeout_s=wait_s + SLACK_S))
        return parse(EventPage, answer)

    async def sweep(self) -> Swept:
        """Have the controller compare its store with its backend now."""
        return parse(Swept, await self.patiently(lambda: self.send("POST", "/v1/sweep")))

    async def list(self, *, owner: str | None = None, live: bool = True) -> Sequence[SandboxView]:
        params = {"live": str(live).lower()} | ({} if owner is None else {"owner": owner})
        return _views.validate_json(await self.patiently(lambda: self.send("GET", "/v1/sandboxes", params=params)))[
            "sandboxes"
        ]

    async def snapshots(self, *, owner: str | None = None) -> Sequence[Snapshot]:
        params = {} if owner is None else {"owner": owner}
        answer = await self.patiently(lambda: self.send("GET", "/v1/snapshots", params=params))
        return _snapshots.validate_json(answer)["snapshots"]

    async def forget_snapshot(self, snapshot_id: str) -> None:
        """Sandboxes that began from it go on. NotFound when there was none."""
        path = f"/v1/snapshots/{quote(snapshot_id, safe='')}"
        await self.patiently(lambda: self.send("DELETE", path))

    async def _close_key(self, owner: str, key: str) -> None:
        params = {"owner": owner, "key": key}
        await self.patiently(lambda: self.send("DELETE", "/v1/sandboxes", params=params))

    async def release(self, closing: Awaitable[None]) -> None:
        """Close also when we are being cancelled; what the controller does not answer in time, its lease ends."""

        async def run() -> None:
            try:
                await closing
            except AgentRLError as error:
                log.warning("a sandbox or snapshot was not ended, its lease will end it: %s", error.message)

        task = asyncio.create_task(run())
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        await asyncio.wait({task}, timeout=RELEASE_S)

    async def send(self, method: str, path: str, **options: Any) -> bytes:
        return (await self.fetch(method, path, **options)).content

    async def fetch(self, method: str, path: str, **options: Any) -> httpx.Response:
        url = self._url
        service = self._services.get(url)
        if service is None:
            service = self._services[url] = Service(url, token=self._token)
        try:
            return await service.request(method, path, **options)
        except ServiceUnavailable as error:
            if url == self._url:
                self._url = error.detail.get("leader") or self._after(url)
            raise

    def _after(self, url: str) -> str:
        """Whom to ask when `url` does not answer."""
        return self._urls[(self._urls.index(url) + 1) % len(self._urls)] if url in self._urls else self._urls[0]

    async def patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an attempt that is safe to repeat while the controller is away.

        When one may have run, later ones that certainly did not do not change that.
        """
        deadline, pause, maybe = time.monotonic() + self._patience_s, 0.05, False
        while True:
            try:
                return await attempt()
            except (ServiceUnavailable, SandboxLost) as error:
                maybe = maybe or error.ran is Ran.MAYBE
                if maybe and error.ran is Ran.NO:
                    error.ran = Ran.MAYBE
                if isinstance(error, SandboxLost) or time.monotonic() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def close(self) -> None:
        if self._releases:
            await asyncio.wait(self._releases)
        for service in self._services.values():
            await service.close()


async def _together(closings: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*closings)
