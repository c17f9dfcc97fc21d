"""What a wire protocol is to the gateway. Implemented by `chat`; called by `gateway.serve`.

Invariant: a wire module only translates. It keeps no state, never touches the tree, and an answer it builds
twice from one node is the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from agentrl.core.errors import AgentRLError
from gateway.conversation import CallRequest
from gateway.tree import Node


class WireCall(Protocol):
    """One request of a protocol, and how to answer it."""

    @property
    def request(self) -> CallRequest: ...

    @property
    def stream(self) -> bool:
        """Whether the harness wants server-sent events."""
        ...

    @property
    def unapplied(self) -> tuple[str, ...]:
        """Fields of the request that were accepted and do nothing."""
        ...

    def answer(self, node: Node) -> dict[str, Any]:
        """The whole answer as JSON."""
        ...

    def events(self, node: Node) -> Iterator[bytes]:
        """The answer as server-sent events, the terminal one last."""
        ...


class Wire(Protocol):
    """One protocol."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> WireCall:
        """RequestError says which field is wrong, or cannot be honoured."""
        ...

    def failure(self, error: AgentRLError) -> dict[str, Any]:
        """The error body that this protocol's clients understand."""
        ...

    def failure_event(self, error: AgentRLError) -> bytes:
        """The same inside a stream that has begun."""
        ...
