"""Pause and resume, and whose turn it is at a sandbox. Used by `controller` and `snapshots`.

Invariants: of one sandbox at most one of pause, resume, snapshot and the end of a close is under way; a record is
PAUSED only once the backend froze the sandbox; a key acts once, and is durable with the state that it led to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

from agentrl.core.errors import AgentRLError, Conflict, Ran, SandboxLost, Unsupported
from agentrl.core.types import SandboxState
from sandbox import leases
from sandbox.backends.base import Backend
from sandbox.records import Records
from sandbox.relay import Relay
from sandbox.states import Record

log = logging.getLogger(__name__)

KEPT_CALLS = 64
"""Of each sandbox, the newest keys that are remembered."""


class Verbs:
    def __init__(self, backend: Backend, records: Records, relay: Relay) -> None:
        self._backend, self._records, self._relay = backend, records, relay
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._moved: dict[str, float] = {}
        """When (monotonic) a sandbox was last paused or resumed."""

    def turn(self, sandbox_id: str) -> asyncio.Lock:
        """Held by whoever changes the sandbox at the backend."""
        lock = self._turns.get(sandbox_id)
        if lock is None:
            lock = self._turns[sandbox_id] = asyncio.Lock()
        return lock

    def drop(self, sandbox_id: str) -> None:
        """The sandbox ended."""
        self._moved.pop(sandbox_id, None)

    async def pause(self, sandbox_id: str, key: str, ttl_s: float | None) -> Record:
        """Freeze it, with a lease of `ttl_s` from now, or as after a command. Conflict while a command runs."""
        return await self._once(sandbox_id, key, f"pause {ttl_s}", ttl_s, self._freeze)

    async def resume(self, sandbox_id: str, key: str) -> Record:
        """Let it go on, with a lease as after a command."""
        return await self._once(sandbox_id, key, "resume", None, self._thaw)

    async def _once(
        self,
        sandbox_id: str,
        key: str,
        call: str,
        ttl_s: float | None,
        act: Callable[[Record], Awaitable[SandboxState]],
    ) -> Record:
        record = await self._records.get(sandbox_id)
        if record.state is SandboxState.CLOSING and key not in record.calls:
            # Told at once, not when it has ended.
            await self._records.ready(sandbox_id)
        async with self.turn(sandbox_id):
            record = await self._records.get(sandbox_id)
            if key in record.calls:
                if record.calls[key] != call:
                    raise Conflict(f"key {key!r} was used for {record.calls[key]!r}: take a fresh key")
                return record
            state = await act(record)
            self._moved[sandbox_id] = time.monotonic()
            current = self._records.live.get(sandbox_id)
            if current is None or current.state is SandboxState.CLOSING:
                raise SandboxLost(f"sandbox {sandbox_id} ended meanwhile", ran=Ran.MAYBE)
            calls = dict(list(current.calls.items())[1 - KEPT_CALLS :]) | {key: call}
            now = self._records.clock.now()
            moved = leases.renewed(current, now=now, ttl_s=ttl_s) if ttl_s else leases.extended(current, now=now)
            await self._records.save(self._in_state(replace(moved, calls=calls), state))
            return await self._records.get(sandbox_id)

    def _in_state(self, record: Record, state: SandboxState) -> Record:
        if record.state is not state:
            return self._records.step(record, state)
        self._records.put(record)
        return record

    async def _freeze(self, record: Record) -> SandboxState:
        if record.state is SandboxState.PAUSED:
            return SandboxState.PAUSED
        await self._records.ready(record.id)
        running = self._relay.changing[record.id]
        if running:
            raise Conflict(f"sandbox {record.id} cannot be paused: {running} commands or writes are under way")
        with self._records.held(record.id, "being paused"):
            try:
                await self._backend.pause(record.id)
            except Unsupported:
                raise
            except AgentRLError:
                # Half frozen is worse than not: what cannot be undone now, the sweep finds.
                with contextlib.suppress(AgentRLError):
                    await self._backend.resume(record.id)
                raise
            self._relay.interrupt(record.id)
        return SandboxState.PAUSED

    async def _thaw(self, record: Record) -> SandboxState:
        if record.state is SandboxState.PAUSED:
            await self._backend.resume(record.id)
            await self.prolong(record.id)
        else:
            await self._records.ready(record.id)
        return SandboxState.READY

    async def prolong(self, sandbox_id: str) -> None:
        """Tell sandboxd of the lease, which it could not be told of while it was paused."""
        told = 0.0
        # Again when it was renewed meanwhile: sandboxd must not end before the lease does.
        while (record := self._records.live.get(sandbox_id)) is not None and record.deadline > told:
            told = max(record.deadline, self._records.clock.now() + record.spec.ttl_s)
            await self._relay.prolong(sandbox_id, told - self._records.clock.now())

    def believe(self, paused: frozenset[str], *, asked: float) -> Sequence[str]:
        """Take over who is frozen from an inventory that was asked for at `asked` (monotonic).

        Returns those that go on, for `prolong`. Record and backend differ after a controller ended in between, or when
        somebody else paused a sandbox.
        """
        resumed = []
        for record in list(self._records.live.values()):
            lock = self._turns.get(record.id)
            if (lock is not None and lock.locked()) or self._moved.get(record.id, 0.0) >= asked:
                continue
            if record.state is SandboxState.READY and record.id in paused:
                log.warning("sandbox %s was paused at the backend", record.id)
                self._records.step(record, SandboxState.PAUSED)
                self._relay.interrupt(record.id)
            elif record.state is SandboxState.PAUSED and record.id not in paused:
                log.warning("sandbox %s was resumed at the backend", record.id)
                self._records.step(leases.extended(record, now=self._records.clock.now()), SandboxState.READY)
                resumed.append(record.id)
        return resumed
