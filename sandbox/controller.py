"""The sandbox controller: what exists, for whom, until when. Called by `sandbox.api`; owns the backend and the store.

The states are in `states`, the leases in `leases`, the records in `records`, the way to a sandbox in `relay`; here is
what makes and ends sandboxes. Invariants: a key creates at most one sandbox; a live record and a placed sandbox go
together, and the sweep removes whichever lacks the other; what has ended stays ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from agentrl.core.config import SandboxConfig
from agentrl.core.errors import AgentRLError, CapacityError, Conflict, Ran, ServiceUnavailable
from agentrl.core.telemetry import Metrics
from agentrl.core.types import SandboxSpec, SandboxState, Snapshot
from sandbox import leases
from sandbox.admission import Admission
from sandbox.backends.base import Backend
from sandbox.pool import Pool
from sandbox.records import Records
from sandbox.relay import Relay
from sandbox.snapshots import Snapshots
from sandbox.states import Record
from sandbox.store import SandboxStore
from sandbox.verbs import Verbs
from sandbox.views import EventPage, Swept

log = logging.getLogger(__name__)

T = TypeVar("T")


class Controller:
    def __init__(
        self,
        backend: Backend,
        store: SandboxStore,
        *,
        metrics: Metrics,
        config: SandboxConfig,
        sweep_s: float = 3.0,
        retention_s: float = 3600.0,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        """`leads` says whether no other controller may act on the store and the backend."""
        self.backend, self.leads = backend, leads
        self.records = Records(store, metrics=metrics, retention_s=retention_s, ended=self._drop)
        self.relay = Relay(backend, self.records, self._explain, metrics=metrics)
        self.verbs = Verbs(backend, self.records, self.relay)
        self.snapshots = Snapshots(
            backend, store.snapshots, self.records, self.verbs, metrics=metrics, retention_s=retention_s,
            leads=lambda: self.leads(),
        )  # fmt: skip
        self._store, self._metrics = store, metrics
        self.pool = Pool(
            backend, size=config.warm, room=lambda: self._capacity - len(self.records.live), metrics=metrics
        )
        self._admission = Admission(config.capacity, config.tenants)
        self._capacity, self._sweep_s = config.capacity, sweep_s
        self._creating: dict[str, asyncio.Task[None]] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loops: list[asyncio.Task[None]] = []

    # --- start and stop ------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the store, adopt what still runs, and begin to sweep."""
        await self.backend.start(self._ended)
        await self.records.load()
        await self.snapshots.load()
        there = (await self.backend.inventory()).live
        for record in list(self.records.live.values()):
            # Whoever asked for these was cut off; what the backend has is the truth. The sweep ends what was closing.
            if record.state in (SandboxState.QUEUED, SandboxState.CREATING):
                if record.id in there:
                    self.records.step(record, SandboxState.READY)
                else:
                    await self.records.end(record, SandboxState.FAILED, "the controller ended while creating it")
        await self.snapshots.release(there)
        await self.sweep()
        adopted = len(self.records.live)
        log.info("sandbox controller: %d sandboxes adopted, isolation %s", adopted, self.backend.isolation)
        self.records.count()
        self._metrics.set("sandbox/isolated_info", float(self.backend.isolation != "none"))
        self._loops = [asyncio.create_task(self._sweeping()), asyncio.create_task(self.records.writing())]
        self._loops.append(asyncio.create_task(self.pool.filling()))

    async def stop(self) -> None:
        """Close every sandbox and forget every snapshot, then the backend and the store."""
        await self._halt()
        closings = (self.close(sandbox_id, "the controller was stopped") for sandbox_id in list(self.records.live))
        await asyncio.gather(*closings, self.pool.close(), return_exceptions=True)
        await self.snapshots.sweep(everything=True)
        await self.backend.stop()
        await self._store.close()

    async def detach(self) -> None:
        """Leave every sandbox to the next controller, and the store as it has to be for it."""
        await self._halt()
        await asyncio.gather(*self._creating.values(), *self._closing.values(), return_exceptions=True)
        await self.pool.close()
        await self.records.flush()
        await self.backend.detach()

    async def _halt(self) -> None:
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, *self._tasks, return_exceptions=True)

    def _background(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _drop(self, sandbox_id: str) -> None:
        self.relay.drop(sandbox_id)
        self.verbs.drop(sandbox_id)

    # --- create --------------------------------------------------------------------------------

    async def create(self, owner: str, key: str, spec: SandboxSpec) -> Record:
        """A sandbox that is READY; the same owner and key give the same sandbox. CapacityError at once."""
        digest = _digest(spec)
        known = self.records.keys.get((owner, key))
        if known is not None:
            return await self._replay(known, key, digest)
        self.snapshots.check(spec, owner)
        self._admit(owner, key, 1)
        return await self._created(self._begin(owner, key, spec, digest))

    async def create_group(self, owner: str, members: Mapping[str, SandboxSpec]) -> Sequence[Record]:
        """As `create` for specs by key, all or none: one that fails ends the others that were made with it."""
        fresh = [key for key in members if (owner, key) not in self.records.keys]
        for key in fresh:
            self.snapshots.check(members[key], owner)
        if fresh:
            self._admit(owner, "\n".join(fresh), len(fresh))
        begun = [self._begin(owner, key, members[key], _digest(members[key])) for key in fresh]
        replays = (
            self._replay(self.records.keys[owner, key], key, _digest(spec))
            for key, spec in members.items()
            if key not in fresh
        )
        made = await asyncio.gather(*map(self._created, begun), *replays, return_exceptions=True)
        failed = [result for result in made if isinstance(result, BaseException)]
        if failed:
            cause = f"another of its group was not made: {failed[0]}"
            await asyncio.gather(*(self.close(record.id, cause) for record in begun))
            raise failed[0]
        return [await self.records.get(self.records.keys[owner, key]) for key in members]

    def _admit(self, owner: str, key: str, count: int) -> None:
        try:
            self._admission.admit(owner, key, count, self.records.tenants, now=self.records.clock.now())
        except CapacityError:
            self._metrics.inc("sandbox/refused_total")
            raise

    def _begin(self, owner: str, key: str, spec: SandboxSpec, digest: str) -> Record:
        """Take the key, and begin to create: from the pool where it has one."""
        taken = self.pool.take(spec)
        record = self.records.new(owner, key, spec, digest=digest, state=SandboxState.CREATING, sandbox_id=taken)
        task = self._creating[record.id] = asyncio.create_task(self._create(record, warm=bool(taken)))
        task.add_done_callback(lambda _: self._creating.pop(record.id, None))
        return record

    async def _created(self, record: Record) -> Record:
        await asyncio.shield(self._creating[record.id])
        return await self.records.get(record.id)

    async def _replay(self, sandbox_id: str, key: str, digest: str) -> Record:
        record = await self.records.get(sandbox_id)
        if not record.digest:
            raise Conflict(f"the creation with key {key!r} was cancelled before it began")
        if record.digest != digest:
            raise Conflict(f"key {key!r} created sandbox {sandbox_id} from another spec: take a fresh key")
        if sandbox_id in self._creating:
            await asyncio.shield(self._creating[sandbox_id])
        return await self.records.get(sandbox_id)

    async def _place(self, record: Record, *, warm: bool) -> None:
        if warm:
            try:
                await self.relay.prepare(record)
            except AgentRLError as error:
                log.warning("sandbox %s of the pool is made anew: %s", record.id, error.message)
                self.relay.drop(record.id)
                await self.backend.destroy(record.id)
            else:
                return
        await self.backend.create(record.id, record.spec, record.owner)

    async def _create(self, record: Record, *, warm: bool) -> None:
        """Placed and recorded at once: a crash between the two is what the sweep is for."""
        started = time.monotonic()
        saving = asyncio.create_task(self.records.save(record))
        try:
            await self._place(record, warm=warm)
            await saving
        except Exception as error:
            await asyncio.wait({saving})
            # What cannot be destroyed now, the sweep destroys.
            with contextlib.suppress(AgentRLError):
                await self.backend.destroy(record.id)
            current = self.records.live.get(record.id)
            if current is not None:
                await self.records.end(current, SandboxState.FAILED, str(error))
            raise
        current = self.records.live.get(record.id)
        if current is not None and current.state is SandboxState.CREATING:
            # Not awaited: a restart that finds CREATING and a live sandbox makes it READY itself. The lease counts
            # from here, since some backends take longer than a short one.
            self.records.step(leases.extended(current, now=self.records.clock.now()), SandboxState.READY)
        self._metrics.observe("sandbox/create_seconds", time.monotonic() - started)

    # --- close ---------------------------------------------------------------------------------

    async def close(self, sandbox_id: str, cause: str) -> Record:
        """Close in whatever state it is; returns the terminal record."""
        if sandbox_id in self.records.live:
            await asyncio.shield(self._begin_close(sandbox_id, cause))
        return await self.records.get(sandbox_id)

    def _begin_close(self, sandbox_id: str, cause: str) -> asyncio.Task[None]:
        """CLOSING on return, so that nothing can be asked of it any more; the task ends it."""
        task = self._closing.get(sandbox_id)
        if task is None:
            record = self.records.live[sandbox_id]
            if record.state is not SandboxState.CLOSING:
                self.records.step(record, SandboxState.CLOSING, cause)
            task = self._closing[sandbox_id] = asyncio.create_task(self._close(sandbox_id))
            task.add_done_callback(lambda _: self._closing.pop(sandbox_id, None))
        return task

    async def close_key(self, owner: str, key: str) -> Record:
        """Close what a key created; a key that is unknown so far will create nothing any more."""
        known = self.records.keys.get((owner, key))
        if known is not None:
            return await self.close(known, "closed by key")
        cause = "closed before it was created"
        record = self.records.new(owner, key, SandboxSpec(), digest="", state=SandboxState.CLOSED, cause=cause)
        await self.records.save(record)
        return record

    async def _close(self, sandbox_id: str) -> None:
        started = time.monotonic()
        if sandbox_id in self._creating:
            await asyncio.wait({self._creating[sandbox_id]})
        async with self.verbs.turn(sandbox_id):
            # A creation that failed ended it.
            if sandbox_id not in self.records.live:
                return
            await self.backend.destroy(sandbox_id)
            record = self.records.live[sandbox_id]
            await self.records.end(record, SandboxState.CLOSED, record.cause)
        self._metrics.observe("sandbox/close_seconds", time.monotonic() - started)

    # --- pause, resume, snapshot ---------------------------------------------------------------

    async def pause(self, sandbox_id: str, key: str, ttl_s: float | None = None) -> Record:
        """See `Verbs.pause`. As the others here, it goes on to its end when who asked leaves."""
        return await asyncio.shield(self._background(self.verbs.pause(sandbox_id, key, ttl_s)))

    async def resume(self, sandbox_id: str, key: str) -> Record:
        return await asyncio.shield(self._background(self.verbs.resume(sandbox_id, key)))

    async def snapshot(self, sandbox_id: str, key: str, ttl_s: float) -> Snapshot:
        return await asyncio.shield(self._background(self.snapshots.make(sandbox_id, key, ttl_s)))

    async def forget_snapshot(self, snapshot_id: str) -> Snapshot:
        return await asyncio.shield(self._background(self.snapshots.forget(snapshot_id)))

    # --- what happens by itself ----------------------------------------------------------------

    def _ended(self, sandbox_id: str, cause: str) -> None:
        """The backend says that a sandbox is gone."""
        self.pool.drop(sandbox_id)
        record = self.records.live.get(sandbox_id)
        if record is not None and record.state not in leases.UNPLACED:
            self._background(self.records.end(record, SandboxState.LOST, cause))

    async def _explain(self, sandbox_id: str) -> str:
        """Why a sandbox does not answer; "" when the backend still has it."""
        if sandbox_id in self.records.live:
            inventory = await self.backend.inventory()
            if sandbox_id in inventory.live:
                return ""
            self._ended(sandbox_id, inventory.ended.get(sandbox_id, "the backend does not know it any more"))
        return (await self.records.get(sandbox_id)).cause

    async def events(self, after: int, *, wait_s: float = 0.0) -> EventPage:
        """The changes of state after a cursor."""
        return await self._store.feed.page(after, wait_s=wait_s)

    async def sweep(self) -> Swept:
        """Close what expired, declare lost what is gone, destroy what nobody owns, forget what ended long ago."""
        await self._keep_time()
        asked = time.monotonic()
        before = {i for i, record in self.records.live.items() if record.state not in leases.UNPLACED}
        placed = await self.backend.inventory()
        if not self.leads():
            raise ServiceUnavailable("another controller may lead by now: nothing was swept", ran=Ran.NO)
        resumed = self.verbs.believe(placed.paused, asked=asked)
        found = leases.sweep(self.records.live.values(), placed.live, placed.ended, now=self.records.clock.now())
        # One that became READY meanwhile may be missing from an answer that was on its way.
        lost = {i: cause for i, cause in found.lost.items() if i in before}
        for sandbox_id, cause in lost.items():
            self._ended(sandbox_id, cause)
        ours = self.records.live.keys() | self.pool.ids
        orphans = [orphan for orphan in found.orphans if orphan not in ours]
        await self._each([*map(self._destroy_orphan, orphans), *map(self.verbs.prolong, resumed)])
        expired = [self._begin_close(i, "the lease ended") for i in found.expired if self._expired(i)]
        # A close that failed, as when the fork server ended meanwhile, left these.
        records = self.records.live.values()
        halfway = [r.id for r in records if r.state is SandboxState.CLOSING and r.id not in self._closing]
        expired += [self._begin_close(i, "closed") for i in halfway]
        await self._each(map(asyncio.shield, expired))
        self.records.measure()
        await self.snapshots.sweep()
        await self.records.purge()
        return Swept(expired=len(expired) - len(halfway), lost=len(lost), orphans=len(orphans))

    async def _keep_time(self) -> None:
        step = self.records.clock.stepped()
        if step:
            log.warning("the clock was set by %+.1f s: leases are moved along", step)
            self.records.shift(step)
            self.relay.shift(step)
            await self.snapshots.shift(step)

    async def _destroy_orphan(self, sandbox_id: str) -> None:
        log.warning("sandbox %s is not in the store: destroying it", sandbox_id)
        self._metrics.inc("sandbox/orphans_total")
        await self.backend.destroy(sandbox_id)

    async def _each(self, work: Iterable[Awaitable[None]]) -> None:
        """One that fails holds up no other: the next sweep finds it again."""
        for failed in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(failed, AgentRLError):
                log.warning("the next sweep tries again: %s", failed.message)
            elif isinstance(failed, BaseException):
                raise failed

    def _expired(self, sandbox_id: str) -> bool:
        """Still so, since a renewal may have come while others were swept."""
        record = self.records.live.get(sandbox_id)
        due = record is not None and record.deadline <= self.records.clock.now() and record.state not in leases.UNPLACED
        return due and sandbox_id not in self.relay.busy

    async def _sweeping(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_s)
            try:
                await self.sweep()
            # Whatever failed, leases must go on ending.
            except Exception:
                log.exception("a sweep failed; the next one is in %.0f s", self._sweep_s)


def _digest(spec: SandboxSpec) -> str:
    return hashlib.sha256(spec.model_dump_json().encode()).hexdigest()
