"""Sandboxes made ahead of demand, for the shapes that were asked for lately. Used by `controller`.

A shape is a spec without its files, which are written when a sandbox is taken. Invariants: each is taken once and
never comes back; they give way when their places are needed; the store does not know them before they are taken, so
that a restart destroys them as orphans.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.core.errors import AgentRLError
from agentrl.core.telemetry import Metrics
from agentrl.core.types import SandboxSpec
from sandbox.backends.base import Backend
from sandbox.records import new_id

log = logging.getLogger(__name__)

SHAPES = 4
"""Shapes that are kept ready; the one asked for longest ago goes first."""
AT_ONCE = 4
"""Sandboxes that are made at a time."""
PAUSE_S = 1.0


@dataclass(slots=True)
class Shape:
    spec: SandboxSpec
    ready: dict[str, float] = field(default_factory=dict)
    """Ids, with the time (monotonic) of their newest renewal."""


class Pool:
    def __init__(self, backend: Backend, *, size: int, room: Callable[[], int], metrics: Metrics) -> None:
        self.making: set[str] = set()
        self._backend, self._size, self._metrics = backend, size, metrics
        self._room = room
        """Places that nobody uses, ours not counted."""
        self._shapes: OrderedDict[str, Shape] = OrderedDict()
        self._wanted = asyncio.Event()

    @property
    def ids(self) -> set[str]:
        """What the backend has for us."""
        return self.making.union(*(shape.ready for shape in self._shapes.values()))

    def take(self, spec: SandboxSpec) -> str:
        """The id of a sandbox of this shape, now the caller's; "" when there is none. Remembers the shape."""
        if not self._size or spec.snapshot:
            return ""
        bare = spec.model_copy(update={"files": {}})
        name = bare.model_dump_json()
        shape = self._shapes.setdefault(name, Shape(bare))
        self._shapes.move_to_end(name)
        self._wanted.set()
        taken = shape.ready.popitem()[0] if shape.ready else ""
        self._metrics.inc("sandbox/warm_total", outcome="hit" if taken else "miss")
        return taken

    def drop(self, sandbox_id: str) -> None:
        """One ended by itself."""
        for shape in self._shapes.values():
            shape.ready.pop(sandbox_id, None)
        self._wanted.set()

    async def filling(self) -> None:
        """Make what is missing, renew what waits, end what is too much; runs until it is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._fill()
            except AgentRLError as error:
                log.warning("the pool was not filled: %s", error.message)
            # Whatever failed, what waits must go on being renewed.
            except Exception:
                log.exception("the pool was not filled")

    async def _fill(self) -> None:
        await self._shrink()
        missing = [s for s in reversed(self._shapes.values()) for _ in range(self._size - len(s.ready))]
        room = max(0, self._room() - len(self.ids))
        await asyncio.gather(*(self._make(shape) for shape in missing[: min(AT_ONCE, room)]))
        if len(missing) > AT_ONCE and room > AT_ONCE:
            self._wanted.set()
        await self._renew()
        self._metrics.set("sandbox/warm_sandboxes", len(self.ids))

    async def _make(self, shape: Shape) -> None:
        sandbox_id = new_id()
        self.making.add(sandbox_id)
        try:
            await self._backend.create(sandbox_id, shape.spec, "")
            shape.ready[sandbox_id] = time.monotonic()
        except Exception as error:
            log.warning("no sandbox was made ahead: %s", error, exc_info=not isinstance(error, AgentRLError))
            # What cannot be destroyed now is nobody's from here, and the sweep's.
            with contextlib.suppress(AgentRLError):
                await self._backend.destroy(sandbox_id)
        # Not when cancelled: then `close` ends it.
        self.making.discard(sandbox_id)

    async def _renew(self) -> None:
        for shape in self._shapes.values():
            for sandbox_id, renewed in list(shape.ready.items()):
                if time.monotonic() - renewed > shape.spec.ttl_s / 2 and sandbox_id in shape.ready:
                    shape.ready[sandbox_id] = time.monotonic()
                    await self._prolong(shape, sandbox_id)

    async def _prolong(self, shape: Shape, sandbox_id: str) -> None:
        channel = self._backend.channel(sandbox_id)
        try:
            await channel.request("POST", "/renew", body=f'{{"ttl_s": {shape.spec.ttl_s}}}'.encode())
        except AgentRLError as error:
            log.warning("sandbox %s was made ahead and did not last: %s", sandbox_id, error.message)
            # One that was taken meanwhile is not ours to destroy.
            if shape.ready.pop(sandbox_id, None) is not None:
                self._wanted.set()
                await self._backend.destroy(sandbox_id)
        finally:
            channel.close()

    async def _shrink(self) -> None:
        """Forget shapes, and give back places that are needed."""
        while len(self._shapes) > SHAPES:
            _, shape = self._shapes.popitem(last=False)
            await self._destroy(shape, len(shape.ready))
        excess = len(self.ids) - max(0, self._room())
        for shape in self._shapes.values():
            excess -= await self._destroy(shape, min(max(0, excess), len(shape.ready)))

    async def close(self) -> None:
        """End what waits, once `filling` does not run any more."""
        for shape in self._shapes.values():
            await self._destroy(shape, len(shape.ready))
        await asyncio.gather(*(self._backend.destroy(sandbox_id) for sandbox_id in self.making))

    async def _destroy(self, shape: Shape, count: int) -> int:
        gone = [shape.ready.popitem()[0] for _ in range(count)]
        self.making.update(gone)
        try:
            await asyncio.gather(*(self._backend.destroy(sandbox_id) for sandbox_id in gone))
        finally:
            # One that could not be destroyed is nobody's from here, and the sweep's.
            self.making.difference_update(gone)
        return count
