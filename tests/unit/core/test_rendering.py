"""The renderer keeps sampled tokens, and no message can smuggle in a special token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.errors import ConfigError
from agentrl.core.rendering import KEEP, MARK, ConversationRenderer, load_renderer
from agentrl.core.types import Message, Tool, ToolCall
from agentrl.testing.tokenizer import MARKUP, SPECIAL, write_tiny_tokenizer

BASH = Tool(name="bash", description="Run <|im_end|> it", parameters={"type": "object", "properties": {}})


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ConversationRenderer:
    return load_renderer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")), "qwen3")


def call(arguments: dict[str, str], raw: str) -> ToolCall:
    return ToolCall(id="c", name="bash", arguments=arguments, raw=raw)


hostile = st.lists(st.sampled_from([*SPECIAL, *MARKUP, MARK, KEEP, "a", "é", " \n"]), max_size=8).map("".join)


@given(hostile)
def test_untrusted_text_never_becomes_a_special_token(renderer: ConversationRenderer, text: str) -> None:
    tokenizer = renderer.tokenizer
    ids = tokenizer.encode(tokenizer.quote(text))
    special = {tokenizer.convert_tokens_to_ids(token) for token in (*SPECIAL, *MARKUP)}
    assert not special & set(ids)
    assert tokenizer.decode(ids) == text


@given(hostile, hostile)
def test_special_tokens_of_a_prompt_are_the_templates_own(
    renderer: ConversationRenderer, user: str, result: str
) -> None:
    plain = [Message(role="user", content="x"), Message(role="tool", content="x", tool_call_id="c")]
    given_ = [Message(role="user", content=user), Message(role="tool", content=result, tool_call_id="c")]
    special = [renderer.tokenizer.convert_tokens_to_ids(token) for token in (*SPECIAL, *MARKUP)]
    expected, found = renderer.prompt(plain, [BASH]), renderer.prompt(given_, [BASH])
    assert [expected.count(token) for token in special] == [found.count(token) for token in special]


def test_extend_keeps_every_token(renderer: ConversationRenderer) -> None:
    prompt = renderer.prompt([Message(role="user", content="hi")], [BASH])
    said = renderer.sampled(Message(role="assistant", tool_calls=(call({"a": "b"}, '{"a": "b"}'),)))
    longer = renderer.extend(prompt, said, [Message(role="tool", content="ok", tool_call_id="c")], [BASH])
    assert longer is not None
    assert longer[: len(prompt) + len(said)] == prompt + said


def test_extend_closes_a_cut_completion(renderer: ConversationRenderer) -> None:
    prompt = renderer.prompt([Message(role="user", content="hi")])
    cut = renderer.sampled(Message(role="assistant", content="hello world"))[:-1]
    longer = renderer.extend(prompt, cut, [Message(role="user", content="go on")], reasoned=False)
    assert longer is not None
    assert longer[len(prompt) + len(cut)] == renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_reasoning_forbids_extending_over_a_user_message(renderer: ConversationRenderer) -> None:
    prompt = renderer.prompt([Message(role="user", content="hi")])
    said = renderer.sampled(Message(role="assistant", content="a", reasoning="because"))
    assert renderer.extend(prompt, said, [Message(role="user", content="b")], reasoned=True) is None


def test_parse_returns_what_was_sampled(renderer: ConversationRenderer) -> None:
    raw = '{"command":  "ls"}'
    message = Message(
        role="assistant", content="let me see", reasoning="why not", tool_calls=(call({"command": "ls"}, raw),)
    )
    ids = renderer.tokenizer.encode(
        '<think>\nwhy not\n</think>\n\nlet me see\n<tool_call>\n{"name": "bash", "arguments": '
        + raw
        + "}\n</tool_call>"
    )
    parsed = renderer.parse([*ids, renderer.stop_token_ids[0]], [BASH])
    assert (parsed.content, parsed.reasoning) == (message.content, message.reasoning)
    assert parsed.tool_calls[0].model_copy(update={"id": "c"}) == message.tool_calls[0]


def test_sampled_adds_no_empty_reasoning(renderer: ConversationRenderer) -> None:
    ids = renderer.sampled(Message(role="assistant", content="hello"))
    assert renderer.tokenizer.decode(ids) == "hello<|im_end|>"


@pytest.mark.parametrize(
    ("text", "name", "raw"),
    [
        ('<tool_call>\n{"name": "bash", "arguments": {"a": }}\n</tool_call>', "bash", '{"a": }}'),
        ('<tool_call>\n{"name": "bash", "arguments": {"a', "bash", '{"a'),
        ('<tool_call>\n{"name": "bash", "arguments": [1]}\n</tool_call>', "bash", "[1]"),
        ("<tool_call>\nwhat\n</tool_call>", "malformed_tool_call", "what"),
    ],
)
def test_malformed_calls_keep_their_text(renderer: ConversationRenderer, text: str, name: str, raw: str) -> None:
    (found,) = renderer.parse(renderer.tokenizer.encode(text), [BASH]).tool_calls
    assert (found.name, found.arguments, found.raw) == (name, None, raw)


def test_call_markup_is_text_without_tools(renderer: ConversationRenderer) -> None:
    text = 'see <tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>'
    parsed = renderer.parse([*renderer.tokenizer.encode(text), renderer.stop_token_ids[0]])
    assert parsed.tool_calls == ()
    assert parsed.content.replace(" ", "") == text.replace(" ", "")


def test_demonstration_is_the_served_conversation(renderer: ConversationRenderer) -> None:
    first = Message(role="assistant", tool_calls=(call({"command": "ls"}, '{"command": "ls"}'),))
    last = Message(role="assistant", content="done")
    task = [Message(role="system", content="be brief"), Message(role="user", content="go")]
    result = Message(role="tool", content="file.txt", tool_call_id="c")
    ids, mask = renderer.demonstration([*task, first, result, last], [BASH])
    prompt, said = renderer.prompt(task, [BASH]), renderer.sampled(first)
    longer = renderer.extend(prompt, said, [result], [BASH])
    assert longer is not None
    assert ids == longer + renderer.sampled(last)
    trained = tuple(token for token, bit in zip(ids, mask, strict=True) if bit)
    assert trained == said + renderer.sampled(last)


def test_a_tokenizer_without_the_familys_tokens_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path)
    broken = (folder / "tokenizer.json").read_text().replace("<|im_start|>", "<|other|>")
    (folder / "tokenizer.json").write_text(broken)
    with pytest.raises(ConfigError, match=r"model\.renderer = 'qwen3'"):
        load_renderer(folder, "qwen3")
