"""The canonical form of a conversation, shared by every wire protocol; and when two messages are the same.

Wire modules turn their protocol's JSON into a `CallRequest` and a `Node`'s reply back into JSON. Invariant:
equality forgives what harnesses change by habit (see `same_message`) and nothing that changes meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from agentrl.core.types import Message, Tool, ToolCall


@dataclass(frozen=True, slots=True)
class CallRequest:
    """One model call as a harness asked for it, in no protocol's terms."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    """In the order sent; their order is part of the prompt."""
    digest: str
    """Hash of the request's body: what a retry repeats."""
    max_tokens: int | None = None
    """The harness's own limit on new tokens; the session's is the other."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are cut off it."""
    parse_tools: bool = True
    """False when the harness forbade tool calls."""
    must_call: str | None = None
    """The tool that the answer has to call; "" is any of them, None leaves it to the model."""
    one_call: bool = False
    """Whether the answer ends after its first tool call."""
    seed: int | None = None
    json_schema: str = ""
    """JSON text of the schema that the answer has to match."""
    retry: bool = False
    """The harness marked this as a repetition of the same body."""
    idempotency_key: str = ""


def same_message(stored: Message, given: Message) -> bool:
    """Whether `given`, from a harness's history, is the message that the tree holds.

    Forgiven for assistant messages: surrounding whitespace; call ids; spacing and key order of arguments;
    reasoning left out; text left out beside tool calls. Changed text, calls or reasoning is another message.
    """
    if stored.role != given.role:
        return False
    if stored.role != "assistant":
        return stored.content == given.content
    if len(stored.tool_calls) != len(given.tool_calls):
        return False
    if not all(_same_call(a, b) for a, b in zip(stored.tool_calls, given.tool_calls, strict=True)):
        return False
    if given.content.strip() != stored.content.strip() and (given.content.strip() or not stored.tool_calls):
        return False
    reasoning = (given.reasoning or "").strip()
    return not reasoning or reasoning == (stored.reasoning or "").strip()


def _same_call(stored: ToolCall, given: ToolCall) -> bool:
    if stored.name != given.name:
        return False
    if stored.arguments is not None and given.arguments is not None:
        return stored.arguments == given.arguments
    return stored.raw == given.raw or _json(stored.raw) == _json(given.raw)


def _json(text: str) -> Any:
    """The parsed text; text that is not JSON is itself, and so never equals another."""
    try:
        return from_json(text)
    except ValueError:
        return ("text", text)
