"""The call tree of one session: append-only, and the record that trajectories are exported from.

Built by `session`, read by `renderer` (to continue a conversation) and `export`. Invariant: a node's tokens are
its parent's tokens, plus the prompt tokens it added, plus what the engine sampled; none of them ever changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Literal

from agentrl.core.types import Message, Provenance, VersionRun
from gateway.conversation import same_message


class Branch(StrEnum):
    """Why a call could not continue the tokens of an earlier one."""

    EDITED = "edited"
    """The history differs from what was said."""
    COMPACTED = "compacted"
    """The conversation started over, shorter, under the same system prompt."""
    SYSTEM_CHANGED = "system_changed"
    TOOLS_CHANGED = "tools_changed"
    REASONING_STRIPPED = "reasoning_stripped"
    """The template removes earlier reasoning at a new user message."""
    CONTINUES_ASSISTANT = "continues_assistant"
    """The history ends with the answer itself: nothing new to answer to."""
    UNPROVABLE_SUFFIX = "unprovable_suffix"
    """The renderer cannot add these messages without touching earlier tokens."""


class Delivery(StrEnum):
    """How far an answer got. Each state includes the ones before it."""

    SAMPLED = "sampled"
    """In the store."""
    FLUSHED = "flushed"
    """Its last byte was handed to the connection."""
    ACKNOWLEDGED = "acknowledged"
    """A later call carried it in its history."""


@dataclass(slots=True, eq=False)
class Node:
    """One model call."""

    seq: int
    """Position in the session, from 0."""
    parent: Node | None
    """The call whose tokens this one continues; None for a root."""
    follows: int | None
    """`seq` of the call whose answer ends the known part of the history; the parent, unless this is a branch."""
    root_key: str
    """Identity of renderer and ordered tools; calls of different keys never share tokens."""
    turn: int
    """Calls on the conversation's line up to this one, over branches."""
    messages: tuple[Message, ...]
    """What the harness added after the parent's reply; for a root, the whole history."""
    reply: Message
    prompt_delta: tuple[int, ...]
    """Prompt tokens after the parent's: closers, the new messages, the generation prompt."""
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionRun, ...]
    finish_reason: Literal["stop", "length"]
    provenance: Provenance
    branch: Branch | None
    digest: str
    idempotency_key: str
    cached_tokens: int = 0
    """Prompt tokens that the engine had in its prefix cache."""
    constrained: bool = False
    """A schema kept the policy from tokens: what was sampled is not a draw of the trained distribution."""
    delivery: Delivery = Delivery.SAMPLED
    children: list[Node] = field(default_factory=list)

    def path(self) -> list[Node]:
        """The calls from the root to this one."""
        line = [self]
        while (parent := line[-1].parent) is not None:
            line.append(parent)
        return line[::-1]

    def prompt_ids(self) -> tuple[int, ...]:
        """What the engine received for this call."""
        before = self.parent.token_ids() if self.parent else ()
        return before + self.prompt_delta

    def token_ids(self) -> tuple[int, ...]:
        """Everything up to and including what was sampled here."""
        return tuple(chain.from_iterable(chain(node.prompt_delta, node.sampled) for node in self.path()))


@dataclass(frozen=True, slots=True)
class Match:
    """The deepest call whose history begins a conversation, and how many messages it accounts for."""

    node: Node
    messages: int


class Tree:
    """All calls of a session."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._roots: list[Node] = []

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def roots(self, root_key: str | None = None) -> list[Node]:
        return [node for node in self._roots if root_key in (None, node.root_key)]

    def match(self, root_key: str, messages: Sequence[Message]) -> Match | None:
        """Where a conversation attaches. Among equally deep calls the newest wins."""
        best: Match | None = None
        open_ends = [(node, 0) for node in self.roots(root_key)]
        while open_ends:
            node, at = open_ends.pop()
            end = _follow(node, messages, at)
            if end is None:
                continue
            if best is None or (end, node.seq) > (best.messages, best.node.seq):
                best = Match(node, end)
            open_ends.extend((child, end) for child in node.children)
        return best

    def add(self, node: Node) -> None:
        """Append a call that is already in the store. The answer it follows is acknowledged by it."""
        if node.seq != len(self.nodes):
            raise ValueError(f"call {node.seq} appended at position {len(self.nodes)}")
        self.nodes.append(node)
        if node.parent is None:
            self._roots.append(node)
        else:
            node.parent.children.append(node)
        if node.follows is not None:
            self.nodes[node.follows].delivery = Delivery.ACKNOWLEDGED

    def superseded(self, node: Node) -> bool:
        """Whether the same request was asked again later and the harness never went on from this answer."""
        if node.delivery is Delivery.ACKNOWLEDGED:
            return False
        siblings = node.parent.children if node.parent else self._roots
        return any(other.seq > node.seq and other.digest == node.digest for other in siblings)

    def leaves(self) -> list[Node]:
        """Ends of lines, in order of creation, without superseded answers."""
        return [node for node in self.nodes if not node.children and not self.superseded(node)]


def _follow(node: Node, messages: Sequence[Message], at: int) -> int | None:
    """The position after `node`'s messages and reply if they are what `messages` holds from `at` on."""
    end = at + len(node.messages) + 1
    if len(messages) < end or not same_message(node.reply, messages[end - 1]):
        return None
    given = messages[at : end - 1]
    return end if all(same_message(a, b) for a, b in zip(node.messages, given, strict=True)) else None
