"""Keeps every replica on the newest version. Implements `protocols.Publisher`; owned by the trainer's process.

Invariant: the pool hears that a replica accepts calls at a version only after that version was verified on it; one
that failed is out of the pool, at its old version, and is tried again until it succeeds or a newer version replaces
the target.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl.core.errors import AgentRLError, EngineError, WeightsError
from agentrl.core.protocols import Applied, Engine, Pool
from agentrl.core.telemetry import Metrics
from agentrl.core.types import WeightManifest
from agentrl.weights.replica import Replica, Target

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between attempts on a replica that failed."""
POLL_S = 2.0
"""Between looks at a replica that is up to date: it may have restarted with older weights."""
SETTLE_S = 10.0
"""How long the first success waits for the other replicas before they are taken out of the pool."""


class Updater:
    """Works inside `async with updater.running()`."""

    def __init__(
        self,
        engines: Sequence[Engine],
        pool: Pool,
        *,
        deadline_s: float,
        metrics: Metrics,
        retry_s: float = RETRY_S,
        poll_s: float = POLL_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._replicas = [Replica(engine, metrics) for engine in engines]
        self._pool = pool
        self._metrics = metrics
        self._deadline_s, self._retry_s, self._poll_s, self._settle_s = deadline_s, retry_s, poll_s, settle_s
        self._target: Target | None = None
        self._retarget = asyncio.Condition()
        self._attempted = asyncio.Condition()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch over the replicas for the duration of the block; a bug in the watching ends the block with it."""
        try:
            async with asyncio.TaskGroup() as group:
                keepers = [group.create_task(self._keep(replica)) for replica in self._replicas]
                try:
                    yield
                finally:
                    for keeper in keepers:
                        keeper.cancel()
        except BaseExceptionGroup as several:
            # Whoever waits for a WeightsError or TrainError of the block must see it, not a group around it.
            raise several.exceptions[0] from None

    async def apply(self, manifest: WeightManifest, path: Path) -> Applied:
        """See `protocols.Publisher`. A replica that is slow or fails is out of the pool when this returns."""
        async with self._retarget:
            self._target = Target(manifest, path)
            self._retarget.notify_all()
        serving = await self._first_success(manifest.version)
        if len(serving) < len(self._replicas):
            await self._settle(manifest.version)
        served = self._serving(manifest.version)
        return Applied(
            urls=tuple(replica.engine.url for replica in served),
            samples=tuple(replica.sample for replica in served if replica.sample is not None),
        )

    async def _first_success(self, version: int) -> list[Replica]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._deadline_s), self._attempted:
                await self._attempted.wait_for(lambda: self._serving(version))
        serving = self._serving(version)
        if not serving:
            problems = "; ".join(f"{r.engine.url}: {r.problem or 'no answer yet'}" for r in self._replicas)
            raise WeightsError(
                f"version {version}: no replica serves it after {self._deadline_s:g} s ({problems}); look at the "
                "engines' logs, or raise weights.deadline_s"
            )
        return serving

    async def _settle(self, version: int) -> None:
        """Give the others a little time, then take out those that are still behind."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settle_s), self._attempted:
                await self._attempted.wait_for(lambda: all(r.attempted == version for r in self._replicas))
        for replica in self._replicas:
            if replica.attempted != version:
                await self._take_out(replica, "it is slower than the others")

    def _serving(self, version: int) -> list[Replica]:
        return [replica for replica in self._replicas if replica.version == version]

    async def _keep(self, replica: Replica) -> None:
        """Bring one replica to the target, again and again."""
        while True:
            target = await self._next(replica)
            try:
                await replica.stage(target)
                # No call starts on weights that nobody has verified.
                await self._pool.set_replica(replica.engine.url, version=replica.version, accepting=False)
                await replica.swap(target)
                await self._pool.set_replica(replica.engine.url, version=target.version, accepting=True)
                replica.accept(target.version)
            except AgentRLError as error:
                replica.problem = error.message
                self._metrics.inc("weights/updates", outcome="failed")
                log.warning("version %d on %s failed: %s", target.version, replica.engine.url, error.message)
                await self._take_out(replica, error.message)
            else:
                replica.problem = ""
                self._metrics.inc("weights/updates", outcome="verified")
            async with self._attempted:
                replica.attempted = target.version
                self._attempted.notify_all()
            if replica.problem:
                await asyncio.sleep(self._retry_s)

    async def _next(self, replica: Replica) -> Target:
        """Wait until there is a target that the replica does not serve."""
        while True:
            async with self._retarget:
                target = self._target
                if target is not None and (replica.version != target.version or replica.problem):
                    return target
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._poll_s):
                        await self._retarget.wait()
                        continue
            if target is not None and await self._fell_back(replica, target):
                return target

    async def _fell_back(self, replica: Replica, target: Target) -> bool:
        """Whether a replica that was up to date now serves something else, as after a restart."""
        try:
            version = (await replica.engine.status()).version
            if version == target.version and not replica.reachable:
                # It came back as it was; the pool may have given it up meanwhile.
                await self._pool.set_replica(replica.engine.url, version=version, accepting=True)
        except EngineError as error:
            # It answers with no version of ours, as vLLM does that was started again by itself.
            log.warning("%s serves nothing known: %s", replica.engine.url, error.message)
            replica.reachable = True
            return True
        except AgentRLError as error:
            log.warning("%s does not answer: %s", replica.engine.url, error.message)
            replica.reachable = False
            return False
        replica.reachable = True
        return version != target.version

    async def _take_out(self, replica: Replica, reason: str) -> None:
        """Tell the pool to send the replica no calls; its version stays the last verified one."""
        try:
            await self._pool.set_replica(replica.engine.url, version=replica.version, accepting=False)
        except AgentRLError as error:
            log.warning("cannot take %s out of the pool (%s): %s", replica.engine.url, reason, error.message)
