"""The tool loop against a scripted Chat Completions service over real HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from agentrl.agents.chat import parse_arguments
from agentrl.agents.tool_loop import ToolLoop
from agentrl.core.environment import Environment, Split
from agentrl.core.errors import Conflict, GatewayError, LimitReached, ServiceUnavailable
from agentrl.core.http import error_response, free_port, server, serving
from agentrl.core.protocols import AgentContext, Sandbox
from agentrl.core.types import Attempt, Failed, Limits, Message, Scored, Stop, Task, Tool, ToolCall, ToolResult


def said(content: str = "", *calls: tuple[str, str], finish: str = "", **more: Any) -> JSONResponse:
    """A completion with text and (name, arguments) calls."""
    tool_calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content or None, "tool_calls": tool_calls or None, **more}
    choice = {"index": 0, "message": message, "finish_reason": finish or ("tool_calls" if calls else "stop")}
    return JSONResponse({"id": "x", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]})


def add(*values: int) -> tuple[str, str]:
    return "add", json.dumps({"values": values})


@dataclass
class Script:
    replies: list[Response]
    seen: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    base_url: str = ""


def scripted_app(script: Script) -> FastAPI:
    """Gives the replies in order and keeps what was asked."""
    app = FastAPI()

    @app.post("/s/{key}/v1/chat/completions")
    async def completions(request: Request) -> Response:
        script.seen.append(await request.json())
        script.headers.append(dict(request.headers))
        return script.replies.pop(0)

    return app


@asynccontextmanager
async def scripted(*replies: Response) -> AsyncIterator[Script]:
    script = Script(list(replies))
    async with serving(scripted_app(script)) as url:
        script.base_url = f"{url}/s/secret/v1"
        yield script


class Adder(Environment):
    """Sums numbers until it sees a zero."""

    name = "adder"
    version = "1"
    tools = (Tool(name="add", description="Add.", parameters={"type": "object"}),)

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        yield Task(env=self.name, id="0", source="adder")

    def messages(self, task: Task) -> Sequence[Message]:
        return (Message(role="system", content="Be exact."), Message(role="user", content="Add."))

    async def act(self, task: Task, call: ToolCall, sandbox: Sandbox | None) -> ToolResult:
        assert call.arguments is not None
        values = call.arguments["values"]
        return ToolResult(content=str(sum(values)), done=0 in values)

    async def score(self, task: Task, attempt: Attempt, sandbox: Sandbox | None) -> Scored | Failed:
        return Scored(reward=1.0)


def context(base_url: str, turns: int = 4, wall_s: float = 20.0) -> AgentContext:
    environment = Adder()
    task = next(environment.tasks("train", 0))
    limits = Limits(turns=turns, wall_s=wall_s)
    return AgentContext(task, environment, base_url, "session-key", "policy", limits, None)


@pytest_asyncio.fixture
async def agent() -> AsyncIterator[ToolLoop]:
    loop = ToolLoop(max_retries=2)
    yield loop
    await loop.close()


async def test_plays_until_a_tool_says_done(agent: ToolLoop) -> None:
    async with scripted(said("", add(1, 2)), said("", add(3, 0), add(9))) as script:
        attempt = await agent.run(context(script.base_url))
    assert (attempt.stop, attempt.turns) == (Stop.DONE, 2)
    assert [m.role for m in attempt.transcript] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert attempt.transcript[3].content == "3"
    assert script.headers[0]["authorization"] == "Bearer session-key"
    assert script.seen[0]["model"] == "policy"
    assert script.seen[0]["tools"][0]["function"]["name"] == "add"


async def test_sends_back_what_the_model_wrote(agent: ToolLoop) -> None:
    spaced = '{"values" :  [1]}'
    async with scripted(said("so", ("add", spaced), reasoning_content="hm"), said("1")) as script:
        attempt = await agent.run(context(script.base_url))
    assert attempt.stop is Stop.ANSWERED
    assistant, tool = script.seen[1]["messages"][2:]
    assert assistant["tool_calls"][0]["function"] == {"name": "add", "arguments": spaced}
    assert (assistant["content"], assistant["reasoning_content"]) == ("so", "hm")
    assert (tool["role"], tool["content"], tool["tool_call_id"]) == ("tool", "1", "c0")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (("add", '{"values": ['), "error: the arguments are not a JSON object"),
        (("add", "[1]"), "error: the arguments are not a JSON object"),
        (("sub", "{}"), "error: no tool 'sub', only add"),
    ],
)
async def test_a_bad_call_is_the_models_to_correct(agent: ToolLoop, call: tuple[str, str], told: str) -> None:
    async with scripted(said("", call), said("", add(0))) as script:
        attempt = await agent.run(context(script.base_url))
    assert attempt.stop is Stop.DONE
    assert attempt.transcript[3].content == told


async def test_stops_at_the_turn_limit(agent: ToolLoop) -> None:
    async with scripted(*[said("", add(1)) for _ in range(3)]) as script:
        attempt = await agent.run(context(script.base_url, turns=2))
    assert (attempt.stop, attempt.turns, len(script.seen)) == (Stop.TURNS, 2, 2)


async def test_a_cut_generation_ends_the_episode_and_its_calls_are_not_carried_out(agent: ToolLoop) -> None:
    async with scripted(said("", add(0), finish="length")) as script:
        attempt = await agent.run(context(script.base_url))
    assert attempt.stop is Stop.TOKENS
    assert attempt.transcript[-1].role == "assistant"


async def test_a_full_context_ends_the_episode(agent: ToolLoop) -> None:
    full = {"error": {"message": "maximum context length is 8 tokens", "code": "context_length_exceeded"}}
    async with scripted(said("", add(1)), JSONResponse(full, status_code=400)) as script:
        attempt = await agent.run(context(script.base_url))
    assert (attempt.stop, attempt.turns) == (Stop.TOKENS, 1)


@pytest.mark.parametrize(
    ("limit", "stop"),
    [("tokens", Stop.TOKENS), ("turns", Stop.TURNS), ("calls", Stop.TURNS), ("wall_s", Stop.DEADLINE)],
)
async def test_a_limit_of_the_session_ends_the_episode(agent: ToolLoop, limit: str, stop: Stop) -> None:
    used_up = error_response(LimitReached("used up", detail={"limit": limit}))
    async with scripted(said("", add(1)), used_up) as script:
        attempt = await agent.run(context(script.base_url))
    assert (attempt.stop, attempt.turns, len(attempt.transcript)) == (stop, 1, 4)


async def test_errors_of_the_gateway_arrive_as_they_were_raised(agent: ToolLoop) -> None:
    async with scripted(error_response(GatewayError("no such branch", detail={"node": 3}))) as script:
        with pytest.raises(GatewayError, match="no such branch") as caught:
            await agent.run(context(script.base_url))
    assert caught.value.detail == {"node": 3}


async def test_rides_out_a_restart_of_the_gateway(agent: ToolLoop) -> None:
    port = free_port()
    playing = asyncio.create_task(agent.run(context(f"http://127.0.0.1:{port}/s/secret/v1")))
    await asyncio.sleep(0.2)
    run = server(scripted_app(Script([said("back")])), port=port)
    running = asyncio.create_task(run.serve())
    attempt = await playing
    run.should_exit = True
    await running
    assert attempt.transcript[-1].content == "back"


async def test_a_refusal_marked_final_is_not_retried(agent: ToolLoop) -> None:
    async with scripted(error_response(Conflict("no")), said("never asked")) as script:
        with pytest.raises(Conflict):
            await agent.run(context(script.base_url))
    assert len(script.seen) == 1


async def test_retries_are_marked_so_that_the_gateway_can_replay(agent: ToolLoop) -> None:
    async with scripted(JSONResponse({}, status_code=503), said("fine")) as script:
        attempt = await agent.run(context(script.base_url))
    assert attempt.stop is Stop.ANSWERED
    assert [h["x-stainless-retry-count"] for h in script.headers] == ["0", "1"]
    assert script.seen[0] == script.seen[1]


async def test_a_gateway_that_stays_away_is_named(agent: ToolLoop) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}/s/secret/v1"
        with pytest.raises(ServiceUnavailable, match="no answer after retries") as caught:
            await agent.run(context(url))
    assert "secret" not in str(caught.value), "the URL holds the session's key"


async def test_episodes_at_once_keep_their_own_sessions(agent: ToolLoop) -> None:
    async with scripted(said("", add(0))) as one, scripted(said("", add(5)), said("5")) as two:
        first, second = await asyncio.gather(agent.run(context(one.base_url)), agent.run(context(two.base_url)))
    assert (first.stop, second.stop) == (Stop.DONE, Stop.ANSWERED)


@pytest.mark.parametrize(
    "raw", ["", "null", '"x"', '{"a":', '{"a": NaN}', '{"a": "\\ud800"}', '{"a":' * 300 + "1" + "}" * 300]
)
def test_arguments_that_are_no_sendable_object_are_none(raw: str) -> None:
    assert parse_arguments(raw) is None
