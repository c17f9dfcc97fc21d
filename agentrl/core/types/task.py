"""Tasks and conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from agentrl.core.types.value import Value


class Limits(Value):
    """What one episode may use."""

    turns: int = Field(8, gt=0)
    """Model calls of the agent's main line."""
    tokens: int = Field(4096, gt=0)
    """Longest prompt + completion, in tokens."""
    wall_s: float = Field(120.0, gt=0)
    """Seconds from dispatch to outcome."""


class Task(Value):
    """One problem of an environment."""

    env: str
    id: str
    source: str
    """Groups metrics, e.g. a data set's name."""
    data: Mapping[str, Any] = Field(default_factory=dict)
    """The environment's own JSON; what `Environment.tasks` put there."""
    limits: Limits = Limits()


class ToolCall(Value):
    id: str
    name: str
    arguments: Mapping[str, Any] | None
    """Parsed arguments; None when `raw` is not a JSON object."""
    raw: str
    """The argument string exactly as the model wrote it."""

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, Any], id: str = "call-0") -> ToolCall:
        """A well-formed call, as demonstrations write them."""
        return cls(id=id, name=name, arguments=arguments, raw=json.dumps(arguments))


class Message(Value):
    """One message of a transcript, in the Chat Completions vocabulary."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


class Tool(Value):
    """A function the model may call; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]


class ToolResult(Value):
    content: str
    done: bool = False
    """True ends the episode after this call."""


class Demonstration(Value):
    """A worked episode for the supervised warm start: messages as an agent would have produced them."""

    task: Task
    messages: tuple[Message, ...]
