"""Chat Completions: requests to the canonical form, answers to JSON and to server-sent events.

Called by `gateway.serve` through `wire.protocol`. Invariant: streamed and whole answers carry the same content,
and a tool call's arguments are the model's own string in both.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from agentrl.core.errors import AgentRLError, ContextOverflow, RequestError
from agentrl.core.rendering import ConversationRenderer
from agentrl.core.types import ToolCall
from gateway.conversation import CallRequest
from gateway.tree import Node
from gateway.wire.chat_fields import (
    check_fields,
    check_together,
    read_json_schema,
    read_seed,
    read_tool_choice,
    refused,
)
from gateway.wire.chat_messages import read_messages, read_tools

ARGUMENT_PIECE = 48
"""Characters of a tool call's arguments in one delta."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One request, with what only this protocol asks for."""

    request: CallRequest
    stream: bool
    renderer: ConversationRenderer
    model: str
    include_usage: bool
    logprobs: bool
    token_ids: bool
    """`return_token_ids`, as vLLM has it."""
    unapplied: tuple[str, ...]

    def answer(self, node: Node) -> dict[str, Any]:
        reply = node.reply
        message: dict[str, Any] = {"role": "assistant", "content": reply.content or None}
        if reply.content == "" and not reply.tool_calls:
            message["content"] = ""
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [_call(call, call.raw) for call in reply.tool_calls]
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": _finish(node)}
        choice["logprobs"] = self._logprobs(node) if self.logprobs else None
        body = self._head(node, "chat.completion") | {"choices": [choice], "usage": _usage(node)}
        if self.token_ids:
            choice["token_ids"] = node.sampled
            body["prompt_token_ids"] = node.prompt_ids()
        return body

    def events(self, node: Node) -> Iterator[bytes]:
        head = self._head(node, "chat.completion.chunk")
        if self.include_usage:
            head["usage"] = None
        first = {"prompt_token_ids": node.prompt_ids()} if self.token_ids else {}
        yield _event(head | first | {"choices": [_delta({"role": "assistant", "content": ""})]})
        for delta in _deltas(node):
            yield _event(head | {"choices": [_delta(delta)]})
        last = _delta({}) | {"finish_reason": _finish(node)}
        if self.logprobs:
            last["logprobs"] = self._logprobs(node)
        if self.token_ids:
            last["token_ids"] = node.sampled
        yield _event(head | {"choices": [last]})
        if self.include_usage:
            yield _event(head | {"choices": [], "usage": _usage(node)})
        yield b"data: [DONE]\n\n"

    def _head(self, node: Node, kind: str) -> dict[str, Any]:
        answer_id = f"chatcmpl-{node.digest[:20]}-{node.seq}"
        return {"id": answer_id, "object": kind, "created": int(time.time()), "model": self.model}

    def _logprobs(self, node: Node) -> dict[str, Any]:
        content = []
        for token_id, logprob in zip(node.sampled, node.logprobs, strict=True):
            token = self.renderer.tokenizer.decode([token_id])
            row = {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            content.append(row)
        return {"content": content, "refusal": None}


class ChatWire:
    """The protocol, for one renderer."""

    def __init__(self, renderer: ConversationRenderer) -> None:
        self._renderer = renderer

    def parse(self, body: bytes, headers: Mapping[str, str]) -> ChatCall:
        fields = _fields(body)
        tools = read_tools(fields.get("tools"))
        unapplied = check_fields(fields)
        schema = read_json_schema(fields.get("response_format"))
        check_together(schema, tools, fields.get("tool_choice"))
        request = CallRequest(
            messages=read_messages(fields.get("messages")),
            tools=tools,
            digest=hashlib.sha256(body).hexdigest(),
            max_tokens=_positive(fields, "max_completion_tokens") or _positive(fields, "max_tokens"),
            stop=_stop(fields.get("stop")),
            parse_tools=fields.get("tool_choice") != "none",
            must_call=read_tool_choice(fields.get("tool_choice"), tools),
            one_call=fields.get("parallel_tool_calls") is False,
            seed=read_seed(fields.get("seed")),
            json_schema=schema,
            retry=headers.get("x-stainless-retry-count", "0") not in ("", "0"),
            idempotency_key=headers.get("idempotency-key", ""),
        )
        options = fields.get("stream_options") or {}
        return ChatCall(
            request=request,
            stream=bool(fields.get("stream")),
            renderer=self._renderer,
            model=str(fields.get("model") or "policy"),
            include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
            logprobs=bool(fields.get("logprobs")),
            token_ids=bool(fields.get("return_token_ids")),
            unapplied=unapplied,
        )

    def failure(self, error: AgentRLError) -> dict[str, Any]:
        body = error.envelope()
        if "param" in error.detail:
            body["error"]["param"] = error.detail["param"]
        if isinstance(error, ContextOverflow):
            body["error"] |= {"code": "context_length_exceeded", "param": "messages"}
        return body

    def failure_event(self, error: AgentRLError) -> bytes:
        return _event(self.failure(error))


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = from_json(body)
    except ValueError:
        fields = _without_surrogates(body)
    if not isinstance(fields, dict):
        raise RequestError("the body is not a JSON object")
    return fields


def _without_surrogates(body: bytes) -> Any:
    """The body with lone surrogates replaced, which tool output brings along when it is not text."""
    try:
        text = json.dumps(json.loads(body), ensure_ascii=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    return from_json(text.encode("utf-8", "replace"))


def _positive(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or value < 1:
        raise refused(name, f"{value!r} is not a positive number")
    return value


def _stop(raw: Any) -> tuple[str, ...]:
    words = [raw] if isinstance(raw, str) else raw or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise refused("stop", f"{raw!r} is neither text nor a list of texts")
    return tuple(word for word in words if word)


def _finish(node: Node) -> str:
    if node.finish_reason == "stop" and node.reply.tool_calls:
        return "tool_calls"
    return node.finish_reason


def _usage(node: Node) -> dict[str, Any]:
    prompt, completion = len(node.prompt_ids()), len(node.sampled)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": node.cached_tokens},
    }


def _call(call: ToolCall, arguments: str) -> dict[str, Any]:
    wire = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
    return wire | {"malformed": True} if call.arguments is None else wire


def _deltas(node: Node) -> Iterator[dict[str, Any]]:
    reply = node.reply
    if reply.reasoning:
        yield {"reasoning_content": reply.reasoning}
    if reply.content:
        yield {"content": reply.content}
    for index, call in enumerate(reply.tool_calls):
        yield {"tool_calls": [{"index": index, **_call(call, "")}]}
        for at in range(0, len(call.raw), ARGUMENT_PIECE):
            piece = call.raw[at : at + ARGUMENT_PIECE]
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _delta(delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": None}


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"
