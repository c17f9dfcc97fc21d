"""What the controller asks of a place for sandboxes. Implemented by `local`; docker and kubernetes fit the same holes.

Invariant: after `destroy` returns, nothing of the sandbox is left; ids are labels by which a restarted controller
finds its own again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from agentrl.core.types import SandboxSpec
from sandbox.channel import Channel

Ended = Callable[[str, str], None]
"""Called with an id and a cause when a sandbox ends by itself."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a backend has now."""

    live: frozenset[str]
    ended: Mapping[str, str]
    """Sandboxes that ended by themselves, with their causes, as far back as the backend remembers."""
    paused: frozenset[str] = frozenset()
    """Those of `live` that are paused."""


class Backend(Protocol):
    """Raises SandboxError, CapacityError, Unsupported; ConfigError from `start` when it cannot work as asked."""

    @property
    def isolation(self) -> str:
        """How sandboxes are kept apart, e.g. `namespaces`; `none` is said loudly everywhere."""
        ...

    async def start(self, ended: Ended) -> None:
        """Connect; sandboxes of an earlier controller are kept."""
        ...

    async def stop(self) -> None:
        """End with every sandbox."""
        ...

    async def detach(self) -> None:
        """Let go of every sandbox as it is, for the next controller."""
        ...

    async def create(self, sandbox_id: str, spec: SandboxSpec, owner: str) -> None:
        """Returns when the sandbox serves and its files are written. `owner` is a label, "" for one of the pool."""
        ...

    async def destroy(self, sandbox_id: str) -> None:
        """Idempotent, also while it is paused; returns when nothing is left."""
        ...

    async def inventory(self) -> Inventory: ...

    def channel(self, sandbox_id: str) -> Channel:
        """The way to its sandboxd."""
        ...

    # Of one sandbox the controller has at most one of the following and `destroy` running at a time.

    async def pause(self, sandbox_id: str) -> None:
        """Freeze every process of it, `sandboxd` included; nothing changes when it is frozen."""
        ...

    async def resume(self, sandbox_id: str) -> None:
        """Let it go on; nothing changes when it does."""
        ...

    async def snapshot(self, sandbox_id: str, snapshot_id: str) -> None:
        """Keep its files under `snapshot_id`, for specs that name it. It goes on, or stays paused, as it was.

        Half a snapshot may be left by an error: `forget_snapshot` follows.
        """
        ...

    async def forget_snapshot(self, snapshot_id: str) -> None:
        """Idempotent; sandboxes that were made from it go on."""
        ...

    async def snapshots(self) -> frozenset[str]:
        """Ids of all that is kept, also of what was made for a controller that did not live to see it."""
        ...
