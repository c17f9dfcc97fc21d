"""What counts as the same message when a harness sends its history back."""

from __future__ import annotations

import pytest

from agentrl.core.errors import RequestError
from agentrl.core.types import Message
from gateway.conversation import same_message
from gateway.wire.chat_messages import read_messages, read_tools

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": [true, null]}'}}
STORED = {"role": "assistant", "content": "I look. ", "reasoning_content": "think", "tool_calls": [CALL]}


def read(raw: dict[str, object]) -> Message:
    return read_messages([raw])[0]


def call(arguments: object, **fields: object) -> dict[str, object]:
    return {**CALL, **fields, "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    "given",
    [
        STORED,
        STORED | {"refusal": None, "annotations": None, "audio": None, "function_call": None},
        STORED | {"content": [{"type": "text", "text": "I look. ", "cache_control": {"type": "ephemeral"}}]},
        STORED | {"content": "\nI look."},
        STORED | {"content": None},
        STORED | {"content": ""},
        {key: value for key, value in STORED.items() if key != "content"},
        STORED | {"reasoning_content": None},
        STORED | {"reasoning_content": " think\n"},
        STORED | {"tool_calls": [call('{"b":[true,null],"a":1}')]},
        STORED | {"tool_calls": [call({"a": 1, "b": [True, None]})]},
        STORED | {"tool_calls": [call('{"a": 1, "b": [true, null]}', id="other", index=0)]},
    ],
)
def test_habits_are_forgiven(given: dict[str, object]) -> None:
    assert same_message(read(STORED), read(given))


@pytest.mark.parametrize(
    "given",
    [
        STORED | {"content": "I looked."},
        STORED | {"reasoning_content": "other thoughts"},
        STORED | {"tool_calls": []},
        STORED | {"tool_calls": [CALL, CALL]},
        STORED | {"tool_calls": [call('{"a": 2, "b": [true, null]}')]},
        STORED | {"tool_calls": [call('{"a": 1, "b": [true, null]')]},
        STORED | {"role": "user"},
    ],
)
def test_changes_are_not(given: dict[str, object]) -> None:
    assert not same_message(read(STORED), read(given))


def test_text_without_calls_may_not_be_left_out() -> None:
    assert not same_message(read({"role": "assistant", "content": "a"}), read({"role": "assistant", "content": None}))


@pytest.mark.parametrize(("a", "b", "same"), [("x", "x", True), ("x", "x ", False), ("", None, True)])
def test_user_text_is_compared_exactly(a: str, b: str | None, same: bool) -> None:
    assert same_message(read({"role": "user", "content": a}), read({"role": "user", "content": b})) is same


def test_a_malformed_call_is_itself() -> None:
    broken = STORED | {"tool_calls": [call('{"a": ')]}
    assert read(broken).tool_calls[0].arguments is None
    assert same_message(read(broken), read(broken))
    assert not same_message(read(broken), read(STORED | {"tool_calls": [call('{"b": ')]}))


def test_every_content_shape_is_read() -> None:
    parts = [{"type": "input_text", "text": "a"}, "b", {"text": "c"}, {"type": "refusal", "refusal": "d"}]
    assert read({"role": "developer", "content": parts}) == Message(role="system", content="abcd")
    assert read({"role": "function", "content": "x"}).role == "tool"
    legacy = read({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}})
    assert (legacy.tool_calls[0].arguments, legacy.tool_calls[0].raw) == ({}, "{}")


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        ([], "messages"),
        ([{"role": "alien", "content": ""}], r"messages\[0\]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], r"messages\[0\]\.content\[0\]"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom"}]}], r"messages\[0\]\.tool_calls\[0\]"),
    ],
)
def test_what_cannot_be_represented_is_refused(raw: object, where: str) -> None:
    with pytest.raises(RequestError, match=where):
        read_messages(raw)


def test_hosted_tools_are_left_to_the_harness() -> None:
    function = {"type": "function", "function": {"name": "f"}}
    tools = read_tools([function, {"type": "web_search"}])
    assert [tool.name for tool in tools] == ["f"]


def test_a_tool_without_a_schema_is_refused_with_its_place() -> None:
    with pytest.raises(RequestError, match=r"tools\[0\]\.parameters"):
        read_tools([{"type": "function", "function": {"name": "f", "parameters": "none"}}])
