"""Where calls attach, why they branch, and what is exported of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentrl.core.errors import GatewayError
from agentrl.core.types import Message, Sampling, Tool
from gateway.export import check_exact, export
from gateway.tree import Branch, Delivery

from .conftest import Conversation

Said = Callable[[str], Message]
BASH = Tool(name="bash", description="", parameters={})


def system(text: str) -> Message:
    return Message(role="system", content=text)


def assistant(text: str, reasoning: str | None = None) -> Message:
    return Message(role="assistant", content=text, reasoning=reasoning)


def test_a_call_attaches_at_the_deepest_answer(conversation: Conversation, user: Said) -> None:
    first = conversation.ask(user("a"), reply="one")
    second = conversation.ask(user("a"), assistant("one"), user("b"), reply="two")
    plan = conversation.plan(user("a"), assistant("one"), user("b"), assistant("two"), user("c"))
    assert (second.parent, plan.parent, plan.turn, plan.branch) == (first, second, 3, None)
    assert plan.prompt_ids == second.token_ids() + plan.prompt_delta
    assert first.delivery is Delivery.ACKNOWLEDGED


def test_two_continuations_share_the_first_answer(conversation: Conversation, user: Said) -> None:
    first = conversation.ask(user("a"), reply="one")
    left = conversation.ask(user("a"), assistant("one"), user("b"), reply="two")
    right = conversation.ask(user("a"), assistant("one"), user("c"), reply="three")
    assert left.parent is right.parent is first
    one, other = export("s", conversation.tree)
    assert sum(one.loss_mask) == len(first.sampled) + len(left.sampled)
    assert sum(other.loss_mask) == len(right.sampled)
    assert other.behavior_logprobs.count(-0.5) == len(first.sampled) + len(right.sampled)
    assert one.session_tokens == other.session_tokens == sum(one.loss_mask) + sum(other.loss_mask)


def test_among_equal_answers_the_newest_is_continued(conversation: Conversation, user: Said) -> None:
    conversation.ask(user("a"), reply="same")
    newest = conversation.ask(user("a"), reply="same")
    assert conversation.plan(user("a"), assistant("same"), user("b")).parent is newest


def test_an_edited_answer_branches(conversation: Conversation, user: Said) -> None:
    conversation.ask(user("a"), reply="one")
    plan = conversation.plan(user("a"), assistant("other"), user("b"))
    assert (plan.parent, plan.branch) == (None, Branch.EDITED)


def test_a_later_edit_remembers_the_turn(conversation: Conversation, user: Said) -> None:
    first = conversation.ask(user("a"), reply="one")
    conversation.ask(user("a"), assistant("one"), user("b"), reply="two")
    plan = conversation.plan(user("a"), assistant("one"), user("b"), assistant("edited"), user("c"))
    assert (plan.parent, plan.branch, plan.turn, plan.follows) == (None, Branch.EDITED, 2, first.seq)


def test_other_tools_branch(conversation: Conversation, user: Said) -> None:
    conversation.ask(user("a"), reply="one")
    assert conversation.plan(user("a"), assistant("one"), user("b"), tools=[BASH]).branch is Branch.TOOLS_CHANGED


def test_another_system_prompt_branches(conversation: Conversation, user: Said) -> None:
    conversation.ask(system("x"), user("a"), reply="one")
    assert conversation.plan(system("y"), user("a"), assistant("one"), user("b")).branch is Branch.SYSTEM_CHANGED


def test_a_summary_starts_over(conversation: Conversation, user: Said) -> None:
    summary = "we looked at every file and found the code in b.txt"
    conversation.ask(system("x"), user("a"), reply=summary)
    assert conversation.plan(system("x"), user(f"So far: {summary}")).branch is Branch.COMPACTED


def test_an_unrelated_conversation_is_no_branch(conversation: Conversation, user: Said) -> None:
    conversation.ask(system("x"), user("a"), reply="one")
    assert conversation.plan(system("title"), user("name this")).branch is None


def test_reasoning_is_stripped_at_a_user_message(conversation: Conversation, user: Said) -> None:
    conversation.ask(user("a"), reply="one", reasoning="because")
    assert conversation.plan(user("a"), assistant("one"), user("b")).branch is Branch.REASONING_STRIPPED


def test_a_history_that_ends_with_the_answer(conversation: Conversation, user: Said) -> None:
    first = conversation.ask(user("a"), reply="one")
    plan = conversation.plan(user("a"), assistant("one"))
    assert (plan.branch, plan.follows) == (Branch.CONTINUES_ASSISTANT, first.seq)


def test_ways_of_sampling_are_exported_apart(conversation: Conversation, user: Said) -> None:
    first = conversation.ask(user("a"), reply="one")
    last = conversation.ask(user("a"), assistant("one"), user("b"), reply="two", sampling=Sampling(temperature=0.5))
    warm, cool = export("s", conversation.tree)
    assert warm.token_ids == cool.token_ids == last.token_ids()
    assert [t.provenance.sampling.temperature for t in (warm, cool)] == [1.0, 0.5]
    assert [sum(t.loss_mask) for t in (warm, cool)] == [len(first.sampled), len(last.sampled)]


def test_a_cut_answer_truncates_the_trajectory(conversation: Conversation, user: Said) -> None:
    conversation.ask(user("a"), finish_reason="length")
    (trajectory,) = export("s", conversation.tree)
    assert trajectory.finish == "truncated"


def test_a_node_that_disagrees_with_the_engine_is_refused(conversation: Conversation, user: Said) -> None:
    node = conversation.ask(user("a"))
    check_exact(node, node.prompt_ids())
    with pytest.raises(GatewayError, match="differ from the"):
        check_exact(node, node.prompt_ids()[1:])
