"""A renderer over the tiny tokenizer, and calls for trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agentrl.core.rendering import ConversationRenderer, load_renderer
from agentrl.core.types import Completion, Message, Provenance, Sampling, Tool, VersionRun
from agentrl.testing.tokenizer import write_tiny_tokenizer
from gateway.conversation import CallRequest
from gateway.renderer import Plan, plan_call
from gateway.tree import Node, Tree


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ConversationRenderer:
    return load_renderer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")), "qwen3")


class Conversation:
    """A tree that grows by asking and answering, without an app around it."""

    def __init__(self, renderer: ConversationRenderer) -> None:
        self.renderer = renderer
        self.tree = Tree()

    def plan(self, *messages: Message, tools: Sequence[Tool] = ()) -> Plan:
        return plan_call(self.tree, self.renderer, CallRequest(messages, tuple(tools), digest=repr(messages)))

    def ask(self, *messages: Message, reply: str = "ok", tools: Sequence[Tool] = (), **fields: Any) -> Node:
        plan = self.plan(*messages, tools=tools)
        message = Message(role="assistant", content=reply, reasoning=fields.pop("reasoning", None))
        sampled = self.renderer.sampled(message)
        completion = Completion(
            token_ids=sampled, logprobs=(-0.5,) * len(sampled), finish_reason="stop", prompt_tokens=0,
            versions=(VersionRun(version=1, start=0, end=len(sampled)),),
        )  # fmt: skip
        provenance = Provenance(tokenizer="t", renderer="r", engine="e", sampling=fields.pop("sampling", Sampling()))
        node = Node(
            seq=len(self.tree.nodes), parent=plan.parent, follows=plan.follows, root_key=plan.root_key, turn=plan.turn,
            messages=plan.messages, reply=message, prompt_delta=plan.prompt_delta, sampled=completion.token_ids,
            logprobs=completion.logprobs, versions=completion.versions,
            finish_reason=fields.pop("finish_reason", "stop"), provenance=provenance, branch=plan.branch,
            digest=repr(messages), idempotency_key="",
        )  # fmt: skip
        assert not fields
        self.tree.add(node)
        return node


@pytest.fixture
def conversation(renderer: ConversationRenderer) -> Conversation:
    return Conversation(renderer)


@pytest.fixture
def user() -> Callable[[str], Message]:
    return lambda text: Message(role="user", content=text)
