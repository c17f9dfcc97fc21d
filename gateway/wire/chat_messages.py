"""Chat Completions messages and tools, in every shape that harnesses send, to the canonical form.

Called by `wire.chat`. Invariant: shapes that mean the same give equal messages; what cannot be represented is
refused with its place in the request, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic_core import from_json, to_json

from agentrl.core.errors import RequestError
from agentrl.core.types import Message, Tool, ToolCall

Role = Literal["system", "user", "assistant", "tool"]

ROLES: Mapping[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Content part types that are text, with the field that holds it."""


def read_messages(raw: Any) -> tuple[Message, ...]:
    if not isinstance(raw, list) or not raw:
        raise RequestError("messages: a list of at least one message is needed")
    return tuple(_message(item, f"messages[{at}]") for at, item in enumerate(raw))


def read_tools(raw: Any) -> tuple[Tool, ...]:
    """The function tools; hosted tools of other types are the harness's own and are left out of the prompt."""
    if not raw:
        return ()
    if not isinstance(raw, list):
        raise RequestError("tools: not a list", detail={"param": "tools"})
    return tuple(_tool(item, f"tools[{at}]") for at, item in enumerate(raw) if _is_function(item))


def _is_function(raw: Any) -> bool:
    return isinstance(raw, Mapping) and raw.get("type", "function") == "function"


def _tool(raw: Mapping[str, Any], where: str) -> Tool:
    function = raw.get("function", raw)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: a function with a name is needed")
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise RequestError(f"{where}.parameters: {parameters!r} is no JSON schema")
    return Tool(name=function["name"], description=str(function.get("description") or ""), parameters=parameters)


def _message(raw: Any, where: str) -> Message:
    if not isinstance(raw, Mapping):
        raise RequestError(f"{where}: not an object")
    role = ROLES.get(str(raw.get("role")))
    if role is None:
        raise RequestError(f"{where}: unknown role {raw.get('role')!r}")
    content = _text(raw.get("content"), f"{where}.content")
    if role == "assistant":
        calls = list(raw.get("tool_calls") or ())
        if raw.get("function_call"):
            calls.append({"function": raw["function_call"]})
        reasoning = raw.get("reasoning_content") or raw.get("reasoning")
        return Message(
            role=role,
            content=content or str(raw.get("refusal") or ""),
            tool_calls=tuple(_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)),
            reasoning=reasoning if isinstance(reasoning, str) else None,
        )
    call_id = raw.get("tool_call_id") if role == "tool" else None
    return Message(role=role, content=content, tool_call_id=None if call_id is None else str(call_id))


def _text(raw: Any, where: str) -> str:
    """A string, null, or a list of text parts."""
    if raw is None:
        return ""
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        raise RequestError(f"{where}: neither text nor a list of parts")
    texts = []
    for at, part in enumerate(raw):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if kind not in TEXT_PARTS:
            raise RequestError(f"{where}[{at}]: a part of type {kind!r} is not supported, only text is")
        texts.append(str(part.get(TEXT_PARTS[kind]) or ""))
    return "".join(texts)


def _call(raw: Any, where: str) -> ToolCall:
    function = raw.get("function") if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: a function call with a name is needed")
    given = function.get("arguments")
    text = given if isinstance(given, str) else to_json(given or {}).decode()
    return ToolCall(
        id=str(raw.get("id") or ""), name=function["name"], arguments=_object(text or "{}"), raw=text or "{}"
    )


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = from_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
