"""What the controller knows of every sandbox: the live records in memory, all of them in the store.

Used by `controller` and `relay`.
Invariants: memory is changed first and at once, the store follows (`save`, or within a second for what only moved
a deadline); a record that has ended is never changed again.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from agentrl.core.errors import Conflict, NotFound, Ran, SandboxLost
from agentrl.core.telemetry import Metrics
from agentrl.core.types import SandboxSpec, SandboxState
from sandbox.admission import tenant_of
from sandbox.clock import Clock
from sandbox.states import TERMINAL, Record, advance
from sandbox.store import SandboxStore

log = logging.getLogger(__name__)

KEPT_ENDED = 1024


def new_id() -> str:
    return f"sb-{uuid.uuid4().hex[:16]}"


class Records:
    def __init__(
        self, store: SandboxStore, *, metrics: Metrics, retention_s: float, ended: Callable[[str], None]
    ) -> None:
        self.clock = Clock()
        self.live: dict[str, Record] = {}
        self.keys: dict[tuple[str, str], str] = {}
        self.tenants: Counter[str] = Counter()
        """Live records by tenant."""
        self._store, self._metrics, self._retention_s, self._ended = store, metrics, retention_s, ended
        self._ended_lately: OrderedDict[str, Record] = OrderedDict()
        """The newest records that ended: they are asked for most, and the store may not have them yet."""
        self._held: dict[str, str] = {}
        """Sandboxes that take no commands for a moment, with what is being done to them."""
        self._dirty: set[str] = set()
        """Records that changed since they were last written."""

    async def load(self) -> None:
        # What the store has was measured by whoever led; a standby may have waited for days.
        self.clock.stepped()
        await self._store.feed.load()
        self.keys = await self._store.keys()
        self.live = {record.id: record for record in await self._store.live()}
        self.tenants = Counter(tenant_of(record.owner) for record in self.live.values())

    def new(
        self,
        owner: str,
        key: str,
        spec: SandboxSpec,
        *,
        digest: str,
        state: SandboxState,
        cause: str = "",
        sandbox_id: str = "",
    ) -> Record:
        """A record that takes the key, in memory only so far."""
        now = self.clock.now()
        ends = state is SandboxState.CLOSED
        record = Record(
            id=sandbox_id or new_id(), owner=owner, key=key, digest=digest, spec=spec, state=state,
            created_at=now, deadline=now if ends else now + spec.ttl_s, ended_at=now if ends else 0.0, cause=cause,
        )  # fmt: skip
        self.keys[owner, key] = record.id
        if record.live:
            self.live[record.id] = record
            self.tenants[tenant_of(owner)] += 1
        self._store.feed.note(record)
        return record

    async def save(self, record: Record) -> None:
        """Durable on return."""
        await self._store.save(record)

    def put(self, record: Record) -> None:
        """A changed record: at once in memory, durable within a second."""
        self.live[record.id] = record
        self._dirty.add(record.id)

    def shift(self, step: float) -> None:
        """The clock was set: what is left of each lease stays."""
        for record in list(self.live.values()):
            self.put(replace(record, deadline=record.deadline + step))

    def step(self, record: Record, state: SandboxState, cause: str = "") -> Record:
        """The record in its next state, in memory; Conflict when that is not a step of the machine."""
        stepped = advance(record, state, now=self.clock.now(), cause=cause)
        self.put(stepped)
        self._store.feed.note(stepped)
        self.count()
        return stepped

    def end(self, record: Record, state: SandboxState, cause: str) -> Coroutine[None, None, None]:
        """End a record, at once in memory; the awaitable returned makes it durable."""
        ended = advance(record, state, now=self.clock.now(), cause=cause)
        if self.live.pop(record.id, None) is not None:
            self.tenants[tenant_of(record.owner)] -= 1
        self._dirty.discard(record.id)
        self._store.feed.note(ended)
        self._ended(record.id)
        self._metrics.inc("sandbox/ended_total", state=state.value)
        self.count()
        self._ended_lately[record.id] = ended
        return self._store.save(ended)

    def count(self) -> None:
        self._metrics.set("sandbox/live_sandboxes", len(self.live))

    def measure(self) -> None:
        """Counts and ages, for /metrics."""
        counts = Counter(record.state for record in self.live.values())
        for state in SandboxState:
            if state not in TERMINAL:
                self._metrics.set("sandbox/state_sandboxes", counts[state], state=state.value)
        oldest = min((record.created_at for record in self.live.values()), default=self.clock.now())
        self._metrics.set("sandbox/oldest_seconds", self.clock.now() - oldest)

    async def get(self, sandbox_id: str) -> Record:
        record = self.live.get(sandbox_id) or self._ended_lately.get(sandbox_id) or await self._store.get(sandbox_id)
        if record is None:
            raise NotFound(f"no sandbox {sandbox_id}: it never was, or ended over {self._retention_s:.0f} s ago")
        return record

    async def ready(self, sandbox_id: str) -> Record:
        """A record that takes commands; SandboxLost with the cause when it has ended."""
        record = await self.get(sandbox_id)
        if record.state is SandboxState.PAUSED:
            raise Conflict(f"sandbox {sandbox_id} is PAUSED: resume it first")
        if record.state in (SandboxState.QUEUED, SandboxState.CREATING):
            raise Conflict(f"sandbox {sandbox_id} is {record.state}, not READY")
        if sandbox_id in self._held:
            raise Conflict(f"sandbox {sandbox_id} is {self._held[sandbox_id]}")
        if record.state is not SandboxState.READY:
            raise SandboxLost(f"sandbox {sandbox_id} is {record.state}: {record.cause}", ran=Ran.NO)
        return record

    def frozen(self, sandbox_id: str) -> bool:
        """Whether nobody inside answers, since it is paused, or is just being paused."""
        record = self.live.get(sandbox_id)
        return sandbox_id in self._held or (record is not None and record.state is SandboxState.PAUSED)

    @contextmanager
    def held(self, sandbox_id: str, why: str) -> Iterator[None]:
        """Let no new command in meanwhile."""
        self._held[sandbox_id] = why
        try:
            yield
        finally:
            del self._held[sandbox_id]

    async def list(self, *, owner: str | None, live: bool) -> Sequence[Record]:
        found = [r for r in self.live.values() if owner is None or r.owner == owner]
        return found if live else [*found, *await self._store.ended(owner)]

    async def purge(self) -> None:
        """Forget what ended long ago, with its keys."""
        for key in await self._store.purge(self.clock.now() - self._retention_s):
            self.keys.pop(key, None)

    async def writing(self) -> None:
        """Write what changed once a second, not once a command; runs until it is cancelled."""
        while True:
            await asyncio.sleep(1.0)
            await self.flush()

    async def flush(self) -> None:
        """Write what changed, and forget what the store has by now."""
        while len(self._ended_lately) > KEPT_ENDED:
            self._ended_lately.popitem(last=False)
        dirty, self._dirty = self._dirty, set()
        for failed in await asyncio.gather(*map(self._write, dirty), return_exceptions=True):
            if isinstance(failed, Exception):
                log.error("deadlines were not written: %s", failed)

    async def _write(self, sandbox_id: str) -> None:
        # Looked up when it is handed over, not before: what has ended meanwhile must not be written as it was.
        record = self.live.get(sandbox_id)
        if record is not None:
            await self._store.save(record)
