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

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> None:
        """Returns when the sandbox serves and its files are written."""
        ...

    async def destroy(self, sandbox_id: str) -> None:
        """Idempotent; returns when nothing is left."""
        ...

    async def inventory(self) -> Inventory: ...

    def channel(self, sandbox_id: str) -> Channel:
        """The way to its sandboxd."""
        ...

    async def pause(self, sandbox_id: str) -> None: ...

    async def resume(self, sandbox_id: str) -> None: ...
