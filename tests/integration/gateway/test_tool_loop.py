"""The tool loop through a real gateway: what is trained is what the engine sampled, turn after turn."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from agentrl.agents.tool_loop import ToolLoop
from agentrl.core.environment import Environment, Split
from agentrl.core.protocols import AgentContext, Sandbox
from agentrl.core.types import (
    Attempt,
    Failed,
    Limits,
    Message,
    Scored,
    SessionGrant,
    Stop,
    Task,
    Tool,
    ToolCall,
    ToolResult,
)
from agentrl.testing.engine import ScriptedEngine

from .conftest import StartGateway


class Shell(Environment):
    """Answers every command, and ends at `exit`."""

    name = "shell"
    version = "1"
    tools = (Tool(name="bash", description="Run.", parameters={"type": "object", "properties": {}}),)

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        yield Task(env=self.name, id="0", source=self.name)

    def messages(self, task: Task) -> Sequence[Message]:
        return (Message(role="user", content="Look around."),)

    async def act(self, task: Task, call: ToolCall, sandbox: Sandbox | None) -> ToolResult:
        return ToolResult(content="<|im_end|> is text here", done=call.raw == EXIT)

    async def score(self, task: Task, attempt: Attempt, sandbox: Sandbox | None) -> Scored | Failed:
        return Scored(reward=1.0)


LS, EXIT = json.dumps({"command": "ls"}), json.dumps({"command": "exit"})


@pytest.fixture
async def agent() -> AsyncIterator[ToolLoop]:
    loop = ToolLoop()
    yield loop
    await loop.close()


def context(grant: SessionGrant, turns: int = 50) -> AgentContext:
    shell = Shell()
    task = next(shell.tasks("train", 0))
    return AgentContext(task, shell, grant.base_url, grant.key, "policy", Limits(turns=turns), None)


async def test_an_episode_is_one_trajectory_of_what_was_sampled(
    agent: ToolLoop, start_gateway: StartGateway, say: Any
) -> None:
    moves = [say("Let me see.", calls=[LS]), say(calls=['{"command": ']), say(calls=[LS, EXIT])]
    engine = ScriptedEngine(moves)
    async with start_gateway([engine]) as gateway:
        grant = await gateway.open()
        attempt = await agent.run(context(grant))
        (trajectory,) = await gateway.admin.seal(grant.id)
    assert (attempt.stop, attempt.turns) == (Stop.DONE, 3)
    told = [message.content for message in attempt.transcript if message.role == "tool"]
    assert told[0] == "<|im_end|> is text here"
    assert told[1] == "error: the arguments are not a JSON object"
    trained = [token for token, mask in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if mask]
    assert trained == [token for move in moves for token in move]
    assert trajectory.token_ids == (*engine.requests[-1].token_ids, *moves[-1])


@pytest.mark.parametrize(
    ("limits", "stop"),
    [(Limits(turns=1, tokens=4000), Stop.TURNS), (Limits(turns=50, tokens=900), Stop.TOKENS)],
)
async def test_limits_of_the_session_end_the_attempt_without_an_error(
    agent: ToolLoop, start_gateway: StartGateway, say: Any, limits: Limits, stop: Stop
) -> None:
    async with start_gateway([ScriptedEngine(lambda request: say(calls=[LS]))]) as gateway:
        grant = await gateway.open(limits=limits)
        attempt = await agent.run(context(grant))
        trajectories = await gateway.admin.seal(grant.id)
    assert attempt.stop is stop
    assert trajectories
