"""Where a demanded tool call can be begun for the model: behind a prompt that an answer with a call would follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.core.errors import RequestError
from agentrl.core.rendering import load_renderer
from agentrl.core.types import Message, Tool
from agentrl.testing.tokenizer import write_tiny_tokenizer
from gateway.conversation import CallRequest
from gateway.renderer import plan_call
from gateway.tree import Tree

TOOLS = (Tool(name="bash", description="", parameters={"type": "object", "properties": {}}),)
ASK = CallRequest((Message(role="user", content="go"),), TOOLS, digest="", must_call="")


@pytest.mark.parametrize(("template", "begun"), [("qwen3", '{"name": "'), ("prime-qwen3", "<function=")])
def test_it_begins_where_the_prompt_ends(tmp_path: Path, template: str, begun: str) -> None:
    renderer = load_renderer(write_tiny_tokenizer(tmp_path / "tokenizer"), template)
    plan = plan_call(Tree(), renderer, ASK)
    text = renderer.tokenizer.decode(plan.prompt_ids)
    assert text.endswith(f"<|im_start|>assistant\n<tool_call>\n{begun}")
    assert plan.prompt_ids[-len(plan.opening) :] == plan.opening


def test_it_is_refused_where_the_prompt_has_opened_the_reasoning(tmp_path: Path) -> None:
    renderer = load_renderer(write_tiny_tokenizer(tmp_path / "tokenizer"), "nemotron-3")
    prompt = renderer.prompt([Message(role="user", content="go")], TOOLS)
    assert renderer.tokenizer.decode(prompt).endswith("<think>\n")
    with pytest.raises(RequestError, match="opens its reasoning"):
        plan_call(Tree(), renderer, ASK)
