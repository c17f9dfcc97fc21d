"""What the controller tells operators, beyond `SandboxView`. Made by `controller` and `relay`, read by `client`.

Invariant: frozen values that travel as JSON; they hold no secrets but what commands were given as arguments.
"""

from __future__ import annotations

from agentrl.core.types import SandboxState, Value


class CommandView(Value):
    """A command that was passed on to a sandbox."""

    key: str
    argv: tuple[str, ...]
    """Its words, each cut after 200 characters."""
    started_at: float
    """Unix seconds."""


class Swept(Value):
    """What one sweep did."""

    expired: int
    """Closed, since their lease ended."""
    lost: int
    """Declared LOST, since the backend does not have them any more."""
    orphans: int
    """Destroyed at the backend, since the store does not know them."""


class SandboxEvent(Value):
    """A sandbox came into a state."""

    seq: int
    """Place in the feed: 1, 2, 3, ..."""
    at: float
    """Unix seconds."""
    sandbox: str
    owner: str
    state: SandboxState
    cause: str = ""


class EventPage(Value):
    events: tuple[SandboxEvent, ...]
    cursor: int
    """What to ask after next."""
    missed: int
    """Events after the cursor asked for that are no longer kept."""
