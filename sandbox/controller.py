"""The sandbox controller: what exists, for whom, until when. Called by `sandbox.api`; owns the backend and the store.

The states are in `states`, the leases in `leases`; here is the I/O between them. Invariants: a key creates at most
one sandbox; a live record and a placed sandbox go together, and the sweep removes whichever lacks the other;
what has ended stays ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from urllib.parse import quote

from agentrl.core.errors import (
    CapacityError,
    Conflict,
    NotFound,
    Ran,
    SandboxError,
    SandboxLost,
    ServiceUnavailable,
)
from agentrl.core.telemetry import Metrics
from agentrl.core.types import ExecRequest, SandboxSpec, SandboxState
from sandbox import leases
from sandbox.backends.base import Backend
from sandbox.channel import Answer, Channel
from sandbox.states import Record, advance
from sandbox.store import SandboxStore

log = logging.getLogger(__name__)

SLACK_S = 10.0
"""Seconds beyond a command's timeout in which sandboxd must answer: TERM, KILL and the drain are inside."""


KEPT_ENDED = 1024


class Controller:
    def __init__(
        self,
        backend: Backend,
        store: SandboxStore,
        *,
        metrics: Metrics,
        capacity: int,
        sweep_s: float = 3.0,
        retention_s: float = 3600.0,
    ) -> None:
        self.backend = backend
        self._store, self._metrics = store, metrics
        self._capacity, self._sweep_s, self._retention_s = capacity, sweep_s, retention_s
        self._live: dict[str, Record] = {}
        self._ended_lately: OrderedDict[str, Record] = OrderedDict()
        """The newest records that ended: they are asked for most, and the store may not have them yet."""
        self._keys: dict[tuple[str, str], str] = {}
        self._channels: dict[str, Channel] = {}
        self._creating: dict[str, asyncio.Task[None]] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._busy: Counter[str] = Counter()
        """Commands that run now: a lease does not end under one."""
        self._idle_deadline: dict[str, float] = {}
        """Of the busy ones: where the lease would end if no command ran."""
        self._dirty: set[str] = set()
        """Records whose deadline moved since it was last written."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []

    # --- start and stop ------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the store, adopt what still runs, and begin to sweep."""
        await self.backend.start(self._ended)
        self._keys = await self._store.keys()
        self._live = {record.id: record for record in await self._store.live()}
        there = (await self.backend.inventory()).live
        for record in list(self._live.values()):
            # Whoever asked for these, or was closing them, was cut off; what the backend has is the truth.
            if record.state in (SandboxState.QUEUED, SandboxState.CREATING):
                if record.id in there:
                    self._put(self._step(record, SandboxState.READY))
                else:
                    await self._finish(record, SandboxState.FAILED, "the controller ended while creating it")
            elif record.state is SandboxState.CLOSING:
                await self.close(record.id, "closed")
        await self.sweep()
        log.info("sandbox controller: %d sandboxes adopted, isolation %s", len(self._live), self.backend.isolation)
        self._metrics.set("sandbox/isolated_info", float(self.backend.isolation != "none"))
        self._loops = [asyncio.create_task(self._sweeping()), asyncio.create_task(self._writing())]

    async def stop(self) -> None:
        """Close every sandbox, then the backend and the store."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, *self._tasks, return_exceptions=True)
        closings = (self.close(sandbox_id, "the controller was stopped") for sandbox_id in list(self._live))
        await asyncio.gather(*closings, return_exceptions=True)
        await self.backend.stop()
        await self._store.close()

    def _background(self, work: Coroutine[None, None, None]) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- create and close ----------------------------------------------------------------------

    async def create(self, owner: str, key: str, spec: SandboxSpec) -> Record:
        """A sandbox that is READY; the same owner and key give the same sandbox."""
        digest = hashlib.sha256(spec.model_dump_json().encode()).hexdigest()
        known = self._keys.get((owner, key))
        if known is not None:
            return await self._replay(known, key, digest)
        if len(self._live) >= self._capacity:
            self._metrics.inc("sandbox/refused_total")
            raise CapacityError(
                f"{len(self._live)} of {self._capacity} sandboxes are live: ask again when one has closed",
                detail={"retry_after_s": 1.0},
            )
        now = time.time()
        record = Record(
            id=f"sb-{uuid.uuid4().hex[:16]}", owner=owner, key=key, digest=digest, spec=spec,
            state=SandboxState.CREATING, created_at=now, deadline=now + spec.ttl_s,
        )  # fmt: skip
        self._keys[owner, key] = record.id
        self._live[record.id] = record
        return await self._created(record.id, asyncio.create_task(self._create(record)))

    async def _created(self, sandbox_id: str, task: asyncio.Task[None]) -> Record:
        self._creating[sandbox_id] = task
        task.add_done_callback(lambda _: self._creating.pop(sandbox_id, None))
        await asyncio.shield(task)
        return await self.get(sandbox_id)

    async def _replay(self, sandbox_id: str, key: str, digest: str) -> Record:
        record = await self.get(sandbox_id)
        if not record.digest:
            raise Conflict(f"the creation with key {key!r} was cancelled before it began")
        if record.digest != digest:
            raise Conflict(f"key {key!r} created sandbox {sandbox_id} from another spec: take a fresh key")
        if sandbox_id in self._creating:
            await asyncio.shield(self._creating[sandbox_id])
        return await self.get(sandbox_id)

    async def _create(self, record: Record) -> None:
        """Placed and recorded at once: a crash between the two is what the sweep is for."""
        started = time.monotonic()
        saving = asyncio.create_task(self._store.save(record))
        try:
            await self.backend.create(record.id, record.spec)
            await saving
        except Exception as error:
            await asyncio.wait({saving})
            with contextlib.suppress(SandboxError):
                await self.backend.destroy(record.id)
            current = self._live.get(record.id)
            if current is not None:
                await self._finish(current, SandboxState.FAILED, str(error))
            raise
        current = self._live.get(record.id)
        if current is not None and current.state is SandboxState.CREATING:
            # Not awaited: a restart that finds CREATING and a live sandbox makes it READY itself.
            self._put(self._step(current, SandboxState.READY))
        self._metrics.observe("sandbox/create_seconds", time.monotonic() - started)

    async def close(self, sandbox_id: str, cause: str) -> Record:
        """Close in whatever state it is; returns the terminal record."""
        record = self._live.get(sandbox_id)
        if record is not None:
            task = self._closing.get(sandbox_id)
            if task is None:
                task = self._closing[sandbox_id] = asyncio.create_task(self._close(sandbox_id, cause))
                task.add_done_callback(lambda _: self._closing.pop(sandbox_id, None))
            await asyncio.shield(task)
        return await self.get(sandbox_id)

    async def close_key(self, owner: str, key: str) -> Record:
        """Close what a key created; a key that is unknown so far will create nothing any more."""
        known = self._keys.get((owner, key))
        if known is not None:
            return await self.close(known, "closed by key")
        now = time.time()
        record = Record(
            id=f"sb-{uuid.uuid4().hex[:16]}", owner=owner, key=key, digest="", spec=SandboxSpec(),
            state=SandboxState.CLOSED, created_at=now, deadline=now, ended_at=now, cause="closed before it was created",
        )  # fmt: skip
        self._keys[owner, key] = record.id
        await self._store.save(record)
        return record

    async def _close(self, sandbox_id: str, cause: str) -> None:
        started = time.monotonic()
        if sandbox_id in self._creating:
            await asyncio.wait({self._creating[sandbox_id]})
        record = self._live.get(sandbox_id)
        if record is None:
            return
        if record.state is not SandboxState.CLOSING:
            record = self._step(record, SandboxState.CLOSING, cause)
            self._live[sandbox_id] = record
        await self.backend.destroy(sandbox_id)
        await self._finish(record, SandboxState.CLOSED, record.cause)
        self._metrics.observe("sandbox/close_seconds", time.monotonic() - started)

    # --- commands, files, leases ---------------------------------------------------------------

    async def exec(self, sandbox_id: str, request: ExecRequest, body: bytes, key: str) -> Answer:
        """Run a command; `body` is the request as it came, and goes on to sandboxd as it is."""
        record = await self._ready(sandbox_id)
        self._begin(record, request.timeout_s)
        started = time.monotonic()
        try:
            return await self._ask(sandbox_id, "POST", "/exec", body, key, request.timeout_s + SLACK_S)
        finally:
            self._done(sandbox_id)
            self._metrics.observe("sandbox/exec_seconds", time.monotonic() - started)

    async def exec_result(self, sandbox_id: str, key: str) -> Answer:
        """The result of an earlier command; waits while it still runs."""
        await self._ready(sandbox_id)
        return await self._ask(sandbox_id, "GET", f"/exec?key={quote(key, safe='')}", timeout_s=3600.0)

    async def read(self, sandbox_id: str, path: str) -> Answer:
        await self._ready(sandbox_id)
        return await self._ask(sandbox_id, "GET", f"/files?path={quote(path, safe='')}")

    async def write(self, sandbox_id: str, path: str, data: bytes, mode: int) -> Answer:
        await self._ready(sandbox_id)
        return await self._ask(sandbox_id, "PUT", f"/files?path={quote(path, safe='')}&mode={mode}", data)

    async def renew(self, sandbox_id: str, ttl_s: float) -> Record:
        """Move the lease's end to `ttl_s` from now; durable on return."""
        await self._ready(sandbox_id)
        await self._ask(sandbox_id, "POST", "/renew", f'{{"ttl_s": {ttl_s}}}'.encode())
        record = leases.renewed(await self._ready(sandbox_id), now=time.time(), ttl_s=ttl_s)
        self._live[sandbox_id] = record
        if sandbox_id in self._idle_deadline:
            self._idle_deadline[sandbox_id] = record.deadline
        await self._store.save(record)
        return record

    async def get(self, sandbox_id: str) -> Record:
        record = self._live.get(sandbox_id) or self._ended_lately.get(sandbox_id) or await self._store.get(sandbox_id)
        if record is None:
            raise NotFound(f"no sandbox {sandbox_id}: it never was, or ended over {self._retention_s:.0f} s ago")
        return record

    async def list(self, *, owner: str | None, live: bool) -> Sequence[Record]:
        found = [r for r in self._live.values() if owner is None or r.owner == owner]
        return found if live else [*found, *await self._store.ended(owner)]

    async def _ready(self, sandbox_id: str) -> Record:
        record = await self.get(sandbox_id)
        if record.state in (SandboxState.QUEUED, SandboxState.CREATING, SandboxState.PAUSED):
            raise Conflict(f"sandbox {sandbox_id} is {record.state}, not READY")
        if record.state is not SandboxState.READY:
            raise SandboxLost(f"sandbox {sandbox_id} is {record.state}: {record.cause}", ran=Ran.NO)
        return record

    async def _ask(
        self, sandbox_id: str, method: str, target: str, body: bytes = b"", key: str = "", timeout_s: float = 60.0
    ) -> Answer:
        channel = self._channels.get(sandbox_id)
        if channel is None:
            channel = self._channels[sandbox_id] = self.backend.channel(sandbox_id)
        try:
            return await channel.request(method, target, body=body, key=key, timeout_s=timeout_s)
        except ServiceUnavailable as error:
            cause = await self._explain(sandbox_id)
            if not cause:
                raise
            raise SandboxLost(f"sandbox {sandbox_id} is gone: {cause}", ran=error.ran) from error

    async def _explain(self, sandbox_id: str) -> str:
        """Why a sandbox does not answer; "" when the backend still has it."""
        if sandbox_id in self._live:
            inventory = await self.backend.inventory()
            if sandbox_id in inventory.live:
                return ""
            self._ended(sandbox_id, inventory.ended.get(sandbox_id, "the backend does not know it any more"))
        return (await self.get(sandbox_id)).cause

    def _begin(self, record: Record, running_s: float) -> None:
        now = time.time()
        extended = leases.extended(record, now=now)
        if self._busy[record.id] == 0:
            self._idle_deadline[record.id] = extended.deadline
        self._busy[record.id] += 1
        self._live[record.id] = leases.held(extended, now=now, running_s=running_s)
        self._dirty.add(record.id)

    def _done(self, sandbox_id: str) -> None:
        self._busy[sandbox_id] -= 1
        if self._busy[sandbox_id]:
            return
        del self._busy[sandbox_id]
        deadline, record = self._idle_deadline.pop(sandbox_id), self._live.get(sandbox_id)
        if record is not None:
            self._live[sandbox_id] = leases.extended(replace(record, deadline=deadline), now=time.time())
            self._dirty.add(sandbox_id)

    # --- what happens by itself ----------------------------------------------------------------

    def _ended(self, sandbox_id: str, cause: str) -> None:
        """The backend says that a sandbox is gone."""
        record = self._live.get(sandbox_id)
        if record is not None and record.state not in leases.UNPLACED:
            self._background(self._finish(record, SandboxState.LOST, cause))

    async def sweep(self) -> None:
        """Close what expired, declare lost what is gone, destroy what nobody owns, forget what ended long ago."""
        placed = await self.backend.inventory()
        found = leases.sweep(self._live.values(), placed.live, placed.ended, now=time.time())
        for sandbox_id, cause in found.lost.items():
            self._ended(sandbox_id, cause)
        for orphan in found.orphans:
            if orphan not in self._live:
                log.warning("sandbox %s is not in the store: destroying it", orphan)
                self._metrics.inc("sandbox/orphans_total")
                await self.backend.destroy(orphan)
        expired = [self.close(i, "the lease ended") for i in found.expired if i not in self._busy]
        # A close that failed, as when the fork server ended meanwhile, left these.
        halfway = [r.id for r in self._live.values() if r.state is SandboxState.CLOSING and r.id not in self._closing]
        await asyncio.gather(*expired, *(self.close(i, "closed") for i in halfway))
        for key in await self._store.purge(time.time() - self._retention_s):
            self._keys.pop(key, None)

    async def _sweeping(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_s)
            try:
                await self.sweep()
            # Whatever failed, leases must go on ending.
            except Exception:
                log.exception("a sweep failed; the next one is in %.0f s", self._sweep_s)

    async def _writing(self) -> None:
        """Write moved deadlines once a second, not once a command."""
        while True:
            await asyncio.sleep(1.0)
            dirty, self._dirty = self._dirty, set()
            saves = (self._store.save(self._live[i]) for i in dirty if i in self._live)
            for failed in await asyncio.gather(*saves, return_exceptions=True):
                if isinstance(failed, Exception):
                    log.error("deadlines were not written: %s", failed)

    def _step(self, record: Record, state: SandboxState, cause: str = "") -> Record:
        return advance(record, state, now=time.time(), cause=cause)

    def _put(self, record: Record) -> None:
        self._live[record.id] = record
        self._dirty.add(record.id)
        self._metrics.set("sandbox/live_sandboxes", len(self._live))

    def _finish(self, record: Record, state: SandboxState, cause: str) -> Coroutine[None, None, None]:
        """End a record, at once in memory; the awaitable returned makes it durable."""
        ended = self._step(record, state, cause)
        self._live.pop(record.id, None)
        self._dirty.discard(record.id)
        channel = self._channels.pop(record.id, None)
        if channel is not None:
            channel.close()
        self._metrics.inc("sandbox/ended_total", state=state.value)
        self._metrics.set("sandbox/live_sandboxes", len(self._live))
        self._ended_lately[record.id] = ended
        if len(self._ended_lately) > KEPT_ENDED:
            self._ended_lately.popitem(last=False)
        return self._store.save(ended)
