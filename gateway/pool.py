"""The engine replicas as the gateway sees them: who lives, who takes calls, at which version, with how many calls.

Owned by the app; `sampler` acquires replicas from it, the weight updater sets their version and whether they
accept. Invariant: a replica that dies fails its calls at once, so that no call waits for the dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from agentrl.core.errors import AgentRLError, NotFound, Ran, ServiceUnavailable
from agentrl.core.protocols import Engine, EngineStatus
from agentrl.core.telemetry import Metrics
from agentrl.core.types import Completion, GenerateRequest, Value
from gateway.router import Router

log = logging.getLogger(__name__)

PROBE_S = 0.5
"""Seconds between health checks of a live replica."""
PROBE_DEAD_S = 0.2
"""Seconds between health checks of a dead one."""
PROBE_TIMEOUT_S = 2.0
MISSES = 3
"""Health checks in a row that may time out before a replica counts as dead; a refused connection counts at once."""
STALE_VERSIONS = 1
"""A replica further behind the newest live one than this takes no calls."""

SATURATION, HEADROOM = 2.0, 8
"""A replica with more calls than this multiple of the mean, and that many more, is passed over."""


@dataclass(slots=True, eq=False)
class Replica:
    """One engine and what is known of it."""

    engine: Engine
    accepting: bool = True
    live: bool = False
    version: int = -1
    name: str = ""
    context: int = 0
    calls: set[asyncio.Task[Completion]] = field(default_factory=set)
    """Calls that this gateway has in flight there."""
    misses: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to check the health now."""

    @property
    def url(self) -> str:
        return self.engine.url

    async def generate(self, request: GenerateRequest) -> Completion:
        """One call. ServiceUnavailable also when the replica is found dead meanwhile."""
        call = asyncio.ensure_future(self.engine.generate(request))
        self.calls.add(call)
        try:
            completion = await call
        except asyncio.CancelledError:
            # A cancellation that nobody asked this task for was the pool's, of the call alone.
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            raise ServiceUnavailable(f"{self.url}: the replica died during the call") from None
        finally:
            self.calls.discard(call)
            call.cancel()
        self.misses = 0
        return completion


class ReplicaView(Value):
    """A row of `GET /v1/pool`."""

    url: str
    live: bool
    accepting: bool
    version: int
    name: str
    context: int
    calls: int
    sessions: int


class ReplicaPool:
    """Health, versions and routing of all replicas."""

    def __init__(self, engines: Sequence[Engine], metrics: Metrics) -> None:
        self._replicas = {engine.url: Replica(engine) for engine in engines}
        self._metrics = metrics
        self._router = Router()
        self._changed = asyncio.Condition()
        self._probes: list[asyncio.Task[None]] = []

    def start(self, held_back: Collection[str] = ()) -> None:
        """Begin the health checks. Replicas at the URLs `held_back` take no calls until `set_replica` lets them."""
        for url in self._replicas.keys() & set(held_back):
            self._replicas[url].accepting = False
            log.warning("%s was taking no calls when the last gateway ended: the weight updater lets it again", url)
        self._probes = [asyncio.create_task(self._watch(replica)) for replica in self._replicas.values()]

    async def close(self) -> None:
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)

    @property
    def context(self) -> int | None:
        """The shortest context of the known replicas, None before any answered."""
        return min((replica.context for replica in self._replicas.values() if replica.context), default=None)

    def views(self) -> list[ReplicaView]:
        return [
            ReplicaView(
                url=url, live=r.live, accepting=r.accepting, version=r.version, name=r.name, context=r.context,
                calls=len(r.calls), sessions=self._router.sessions(url),
            )
            for url, r in self._replicas.items()
        ]  # fmt: skip

    async def acquire(self, session_id: str) -> Replica:
        """The session's replica; waits while none can take a call. The caller brings the timeout."""
        chosen = self._choose(session_id)
        if chosen is not None:
            return chosen
        self._metrics.inc("gateway/waiting_calls")
        try:
            async with self._changed:
                while (chosen := self._choose(session_id)) is None:
                    await self._changed.wait()
            return chosen
        finally:
            self._metrics.inc("gateway/waiting_calls", -1)

    def release(self, session_id: str) -> None:
        self._router.release(session_id)

    async def suspect(self, replica: Replica) -> None:
        """A call to it failed as if it were gone: no more calls until a health check, made now, succeeds."""
        replica.live = False
        replica.wake.set()
        await self._notify()

    async def set_replica(self, url: str, *, version: int, accepting: bool) -> None:
        """What the weight updater knows. NotFound for a URL that is not in the pool."""
        replica = self._replicas.get(url)
        if replica is None:
            raise NotFound(f"no replica {url!r} in this pool (known: {', '.join(self._replicas)})")
        replica.version, replica.accepting = version, accepting
        await self._notify()

    def _choose(self, session_id: str) -> Replica | None:
        live = {url: replica for url, replica in self._replicas.items() if replica.live}
        newest = max((replica.version for replica in live.values()), default=0)
        fresh = [r for r in live.values() if r.accepting and r.version >= newest - STALE_VERSIONS]
        most = SATURATION * sum(len(r.calls) for r in fresh) / max(1, len(fresh)) + HEADROOM
        chosen = self._router.choose(session_id, [r.url for r in fresh if len(r.calls) < most], live)
        return None if chosen is None else self._replicas[chosen]

    async def _watch(self, replica: Replica) -> None:
        while True:
            await self._probe(replica)
            replica.wake.clear()
            # Not wait_for, here or below: in Python 3.11 it can lose the cancellation that ends this loop.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_S if replica.live else PROBE_DEAD_S):
                    await replica.wake.wait()

    async def _probe(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                status = await replica.engine.status()
        except Exception as error:
            # Whatever the answer lacks, a replica whose state cannot be read gets no calls.
            if not isinstance(error, AgentRLError | TimeoutError):
                log.exception("%s: its status cannot be read", replica.url)
            replica.misses += 1
            refused = isinstance(error, AgentRLError) and error.ran is Ran.NO
            if refused or replica.misses >= MISSES:
                await self._lost(replica, str(error) or "health checks time out")
        else:
            await self._up(replica, status)

    async def _up(self, replica: Replica, status: EngineStatus) -> None:
        known = (replica.live, replica.version)
        replica.misses = 0
        replica.live, replica.version = True, status.version
        replica.name, replica.context = status.name, status.context
        if known != (True, status.version):
            log.info("%s serves version %d", replica.url, status.version)
            await self._notify()

    async def _lost(self, replica: Replica, why: str) -> None:
        if not replica.live and not replica.calls:
            return
        log.warning("%s is gone with %d calls in flight: %s", replica.url, len(replica.calls), why)
        replica.live = False
        for call in replica.calls:
            call.cancel()
        await self._notify()

    async def _notify(self) -> None:
        self._metrics.set("gateway/replicas_live", sum(replica.live for replica in self._replicas.values()))
        async with self._changed:
            self._changed.notify_all()
