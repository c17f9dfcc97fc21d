"""Turns a conversation into prompt tokens that continue the tokens already recorded. Called by `session`.

Invariant: a plan with a parent extends the parent's tokens without changing one; what cannot be continued
becomes a branch, rendered from its messages, with the reason.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl.core.errors import RequestError
from agentrl.core.rendering import ConversationRenderer
from agentrl.core.types import Message, Tool
from gateway.conversation import CallRequest, same_message
from gateway.tree import Branch, Match, Node, Tree

MIN_SUMMARY = 40
"""Characters from which on an earlier answer inside a user message is taken for a summary of the conversation."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a call attaches and what the engine is asked to continue."""

    root_key: str
    parent: Node | None
    follows: int | None
    turn: int
    messages: tuple[Message, ...]
    """What the call adds after the parent's reply."""
    prompt_ids: tuple[int, ...]
    prompt_delta: tuple[int, ...]
    branch: Branch | None
    opening: tuple[int, ...] = ()
    """The last tokens of the prompt, when they begin the answer: the call that the harness demands."""


def plan_call(tree: Tree, renderer: ConversationRenderer, request: CallRequest) -> Plan:
    """Attach at the deepest call that the history begins with, or branch; begin the tool call that is demanded."""
    plan = _attach(tree, renderer, request)
    if request.must_call is None:
        return plan
    opening = renderer.opening(request.tools, request.must_call)
    if not opening:
        raise RequestError(
            f"tool_choice: in the template {renderer.fingerprint} no call can be begun for the model (the prompt opens "
            "its reasoning, or calls have no common beginning): send auto",
            detail={"param": "tool_choice"},
        )
    prompt_ids, prompt_delta = plan.prompt_ids + opening, plan.prompt_delta + opening
    return replace(plan, prompt_ids=prompt_ids, prompt_delta=prompt_delta, opening=opening)


def _attach(tree: Tree, renderer: ConversationRenderer, request: CallRequest) -> Plan:
    root_key = _root_key(renderer, request.tools)
    match = tree.match(root_key, request.messages)
    follows = match.node.seq if match else None
    turn = match.node.turn + 1 if match else 1
    if match is None:
        branch = _why_unmatched(tree, root_key, request.messages)
    else:
        added = request.messages[match.messages :]
        before, reasoned = match.node.prompt_ids(), _reasoned(match.node)
        extended = renderer.extend(before, match.node.sampled, added, request.tools, reasoned=reasoned)
        if extended is not None:
            delta = extended[len(before) + len(match.node.sampled) :]
            return Plan(root_key, match.node, follows, turn, added, extended, delta, None)
        branch = _why_unproved(match, added, reasoned)
    prompt_ids = renderer.prompt(request.messages, request.tools)
    return Plan(root_key, None, follows, turn, request.messages, prompt_ids, prompt_ids, branch)


def _reasoned(node: Node) -> bool:
    """Whether the tokens up to here hold reasoning."""
    return any(message.reasoning for call in node.path() for message in (*call.messages, call.reply))


def _root_key(renderer: ConversationRenderer, tools: Sequence[Tool]) -> str:
    ordered = json.dumps([tool.model_dump(mode="json") for tool in tools], separators=(",", ":"))
    return hashlib.sha256(f"{renderer.fingerprint}\n{renderer.tokenizer_fingerprint}\n{ordered}".encode()).hexdigest()


def _why_unmatched(tree: Tree, root_key: str, messages: Sequence[Message]) -> Branch | None:
    """The reason for a new root; None when it is another conversation."""
    opening = _opening(messages)
    alike = [node for node in tree.roots() if _same(_opening(node.messages), opening)]
    if alike:
        return Branch.EDITED if any(node.root_key == root_key for node in alike) else Branch.TOOLS_CHANGED
    asked = [message.content for message in messages if message.role == "user"]
    replies = [node.reply.content for node in tree if len(node.reply.content) >= MIN_SUMMARY]
    if any(reply in text for reply in replies for text in asked):
        return Branch.COMPACTED
    known = [_opening(node.messages) for node in tree.roots(root_key)]
    return Branch.SYSTEM_CHANGED if any(_same(start[-1:], opening[-1:]) for start in known) else None


def _why_unproved(match: Match, added: Sequence[Message], reasoned: bool) -> Branch:
    if not added:
        return Branch.CONTINUES_ASSISTANT
    if any(message.role == "assistant" for message in added):
        return Branch.EDITED
    if reasoned and any(message.role == "user" for message in added):
        return Branch.REASONING_STRIPPED
    return Branch.UNPROVABLE_SUFFIX


def _opening(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages up to the first that a user sent."""
    first = next((at for at, message in enumerate(messages) if message.role == "user"), len(messages) - 1)
    return messages[: first + 1]


def _same(a: Sequence[Message], b: Sequence[Message]) -> bool:
    return len(a) == len(b) and all(map(same_message, a, b))
