"""Chat Completions on the wire, to and from `core.types`. Called by `tool_loop`.

Invariant: what the model wrote is kept as it wrote it; arguments that are no JSON object stay raw, as None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai.types.chat import ChatCompletionMessage
from pydantic_core import from_json

from agentrl.core.types import Message, Tool, ToolCall


def tool_to_wire(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def message_to_wire(message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.raw}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        wire["reasoning_content"] = message.reasoning
    return wire


def message_from_wire(message: ChatCompletionMessage) -> Message:
    calls = [call for call in message.tool_calls or () if call.type == "function"]
    return Message(
        role="assistant",
        content=message.content or "",
        reasoning=(message.model_extra or {}).get("reasoning_content"),
        tool_calls=tuple(
            ToolCall(
                id=call.id,
                name=call.function.name,
                arguments=parse_arguments(call.function.arguments),
                raw=call.function.arguments,
            )
            for call in calls
        ),
    )


def parse_arguments(raw: str) -> Mapping[str, Any] | None:
    """The arguments as an object, or None. The parser also refuses what could not be sent on, like lone surrogates."""
    try:
        parsed = from_json(raw, allow_inf_nan=False)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None
