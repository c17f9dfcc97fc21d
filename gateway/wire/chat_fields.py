"""Every field of a Chat Completions request that is not a message or a tool: honoured, not applied, or refused.

Called by `wire.chat`. Invariant: nothing that a harness asks for is left out in silence. What changes the answer and
cannot be done is refused; what the session decides, or cannot matter, is accepted and named in `unapplied`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from agentrl.core.errors import RequestError
from agentrl.core.types import Tool

HONOURED = frozenset(
    (
        "messages", "tools", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "stop",
        "tool_choice", "parallel_tool_calls", "seed", "response_format", "logprobs", "return_token_ids",
    )
)  # fmt: skip
HARMLESS = frozenset(
    (
        "metadata", "store", "user", "service_tier", "prediction", "prompt_cache_key", "prompt_cache_retention",
        "safety_identifier",
    )
)  # fmt: skip
"""Say nothing about the answer itself."""
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "bad_words": ([],),
}
"""Refused with any other value than these and null."""
INSTEAD: Mapping[str, str] = {
    "n": "one choice a call; send the request again for another sample",
    "top_logprobs": "only the sampled tokens' own logprobs are recorded: leave it out",
    "functions": "send `tools`",
    "function_call": "send `tools` and `tool_choice`",
}
SAMPLING = "the session decides how it samples, since the trainer has to know: leave it out"


def check_fields(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuses what cannot be done; returns the fields that are accepted without being applied."""
    for name, neutral in NEUTRAL.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            raise refused(name, f"{value!r} is not supported: {INSTEAD.get(name, SAMPLING)}")
    known = HONOURED | HARMLESS | NEUTRAL.keys()
    unknown = {name for name, value in fields.items() if value is not None and name not in known}
    return tuple(sorted(unknown | _hosted(fields.get("tools"))))


def _hosted(tools: Any) -> set[str]:
    """The tools that are no functions, which never reach the model, by type."""
    found = [tool.get("type", "function") for tool in tools or () if isinstance(tool, Mapping)]
    return {f"tools of type {kind}" for kind in found if kind != "function"}


def refused(name: str, why: str) -> RequestError:
    return RequestError(f"{name}: {why}", detail={"param": name})


def read_tool_choice(raw: Any, tools: Sequence[Tool]) -> str | None:
    """The tool that must be called, "" for any of them; None when the model may choose not to."""
    if raw in (None, "auto", "none"):
        return None
    known = [tool.name for tool in tools]
    if not known:
        raise refused("tool_choice", f"{raw!r} needs `tools` to choose from")
    if raw == "required":
        return known[0] if len(known) == 1 else ""
    function = raw.get("function") if isinstance(raw, Mapping) and raw.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise refused("tool_choice", f'{raw!r} is not "auto", "none", "required" or a function')
    if name not in known:
        raise refused("tool_choice", f"no tool {name!r} was sent (there are {', '.join(known)})")
    return str(name)


def read_json_schema(raw: Any) -> str:
    """The schema of `response_format` as JSON text; "" for free text."""
    kind = raw.get("type") if isinstance(raw, Mapping) else raw
    if kind in (None, "text"):
        return ""
    if kind == "json_object":
        return '{"type":"object"}'
    wanted = raw.get("json_schema") if kind == "json_schema" else None
    schema = wanted.get("schema") if isinstance(wanted, Mapping) else None
    if not isinstance(schema, Mapping):
        raise refused("response_format", f'{raw!r} is neither "text", "json_object" nor a json_schema with its schema')
    return to_json(schema).decode()


def check_together(schema: str, tools: Sequence[Tool], choice: Any) -> None:
    """A constrained answer is the schema's JSON from its first token on, so it could call none of the tools."""
    if schema and tools and choice != "none":
        raise refused(
            "response_format",
            "it would keep the model from calling any of `tools`: send it with the request for the last answer alone, "
            "with tool_choice 'none', or offer a tool with these parameters in its stead",
        )


def read_seed(raw: Any) -> int | None:
    if raw is None or (isinstance(raw, int) and not isinstance(raw, bool)):
        return raw
    raise refused("seed", f"{raw!r} is not an integer")
