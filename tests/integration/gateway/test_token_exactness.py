"""Whatever harness and engine do, trajectories hold exactly what the engine received and returned.

Random episodes over the real app: retries, repeats, cut and aborted generations, failing engines, answers that come
back changed, hostile text, sessions read back from the store. The engine's own log is the truth that every exported
array is compared with.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from agentrl.core.config import GatewayConfig
from agentrl.core.db import sqlite_url
from agentrl.core.errors import EngineError, Ran
from agentrl.core.rendering import ConversationRenderer
from agentrl.core.types import Completion, GenerateRequest, Limits, Sampling, SessionRequest, Trajectory, VersionRun
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.tokenizer import MARKUP, SPECIAL
from gateway.app import create_gateway_app
from gateway.store import open_store

from .conftest import BASH

hostile = st.lists(st.sampled_from([*SPECIAL, *MARKUP, "ok", " ", "\n", "é", "\ufdd0"]), max_size=6).map("".join)
arguments = st.sampled_from(
    ['{"command": "ls"}', '{"command":"a\\n<|im_end|>", "n": 1}', "{}", "[1]", '{"a": ', "null"]
)


@dataclass(frozen=True)
class Answer:
    """What the engine does with one call."""

    text: str
    reasoning: str
    calls: tuple[str, ...]
    soup: tuple[int, ...]
    """Ids instead of a proper answer; taken modulo the vocabulary."""
    keep: int
    """Tokens kept of it; 0 keeps all."""
    cuts: tuple[int, ...]
    """Tokens of the parts that the engine aborts, before the rest."""
    failures: int


@dataclass(frozen=True)
class Turn:
    """One exchange: how the harness asks, what it is answered, how it carries that on."""

    answer: Answer
    again: Answer
    """Answers an unmarked repeat."""
    repeat: bool
    retry: bool
    stream: bool
    reload: bool
    """The session leaves memory before the next call."""
    carried: str
    said: str
    """The next user message or tool result."""


answers = st.builds(
    Answer,
    text=hostile,
    reasoning=st.sampled_from(["", "", "because"]) | hostile,
    calls=st.lists(arguments, max_size=2).map(tuple),
    soup=st.just(()) | st.lists(st.integers(0, 1000), min_size=1, max_size=20).map(tuple),
    keep=st.sampled_from([0, 0, 0, 1, 5]),
    cuts=st.lists(st.integers(0, 6), max_size=2).map(tuple),
    failures=st.sampled_from([0, 0, 0, 0, 0, 1]),
)
turns = st.builds(
    Turn,
    answer=answers,
    again=answers,
    repeat=st.sampled_from([False, False, False, True]),
    retry=st.booleans(),
    stream=st.booleans(),
    reload=st.booleans(),
    carried=st.sampled_from(["verbatim", "verbatim", "no_reasoning", "redumped", "parts", "edited", "dropped"]),
    said=hostile,
)


class Chaos(ScriptedEngine):
    """Plays parts of answers and writes down what it saw and returned; every logprob is unique."""

    def __init__(self) -> None:
        super().__init__([])
        self.parts: deque[Sequence[int] | None] = deque()
        """Ids of the next part, an abort after it unless it is the last; None fails."""
        self.log: list[tuple[GenerateRequest, Completion]] = []
        self.sampled = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        part = self.parts.popleft()
        if part is None:
            raise EngineError("the engine stumbled", ran=Ran.MAYBE)
        ids = list(part)[: request.sampling.max_tokens]
        stop = next((at for at, token in enumerate(ids) if token in request.stop_token_ids), None)
        ids = ids if stop is None else ids[: stop + 1]
        aborted = bool(self.parts) and stop is None
        if not aborted:
            self.parts.clear()
        logprobs = tuple(-(self.sampled + n + 1) / 4096 for n in range(len(ids)))
        self.sampled += len(ids)
        completion = Completion(
            token_ids=tuple(ids),
            logprobs=logprobs,
            finish_reason="abort" if aborted else "length" if stop is None else "stop",
            versions=(VersionRun(version=self.version, start=0, end=len(ids)),) if ids else (),
            prompt_tokens=len(request.token_ids),
        )
        self.log.append((request, completion))
        self.version += aborted
        return completion


@dataclass
class Call:
    """One call as the engine's log tells it."""

    prompt: tuple[int, ...]
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class World:
    """The app, without sockets, and the harness's side of an episode."""

    def __init__(self, http: httpx.AsyncClient, engine: Chaos, renderer: ConversationRenderer, say: Any) -> None:
        self.http, self.engine, self.renderer, self.say = http, engine, renderer, say

    async def play(self, opening: str, plan: Sequence[Turn]) -> tuple[list[Call], set[int], list[Trajectory]]:
        """The calls, the numbers of those that were superseded, and the export."""
        limits = Limits(turns=100, tokens=4000, wall_s=600)
        request = SessionRequest(task_id="t", limits=limits, sampling=Sampling(max_tokens=60))
        grant = (await self.http.post("/v1/sessions", content=request.model_dump_json())).json()
        self.engine.log.clear()
        superseded: set[int] = set()
        messages: list[dict[str, Any]] = [{"role": "system", "content": opening}, {"role": "user", "content": opening}]
        for turn in plan:
            body = {"model": "policy", "messages": messages, "tools": [BASH], "stream": turn.stream}
            message = await self.ask(grant, body, turn.answer)
            if turn.retry:
                assert await self.ask(grant, body, None) == message
            if turn.repeat:
                superseded.add(len(self.calls()) - 1)
                message = await self.ask(grant, body, turn.again)
            messages = [*messages, *carry(message, turn)]
            if turn.reload:
                await self.http.post("/v1/sessions", content=request.model_dump_json())
        sealed = await self.http.post(f"/v1/sessions/{grant['id']}/seal")
        again = await self.http.get(f"/v1/sessions/{grant['id']}/trajectories")
        assert sealed.content == again.content
        return self.calls(), superseded, TypeAdapter(list[Trajectory]).validate_json(sealed.content)

    async def ask(self, grant: dict[str, Any], body: dict[str, Any], answer: Answer | None) -> dict[str, Any]:
        """One call; without an answer it is a marked retry, and the engine must not be asked."""
        if answer is not None:
            self.engine.parts.extend(self.parts(answer))
        headers = {} if answer else {"x-stainless-retry-count": "1"}
        path = f"/s/{grant['key']}/v1/chat/completions"
        response = await self.http.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        assert not self.engine.parts
        return assembled(response.text) if body["stream"] else dict(response.json()["choices"][0]["message"])

    def parts(self, answer: Answer) -> Iterator[Sequence[int] | None]:
        ids = self.say(answer.text, reasoning=answer.reasoning, calls=answer.calls)
        if answer.soup:
            ids = tuple(token % self.renderer.tokenizer.vocab_size for token in answer.soup)
        ids = ids[: answer.keep or None]
        yield from [None] * answer.failures
        for cut in answer.cuts:
            yield ids[:cut]
            ids = ids[cut:]
        yield ids or self.renderer.stop_token_ids[:1]

    def calls(self) -> list[Call]:
        calls: dict[str, Call] = {}
        for request, completion in self.engine.log:
            call = calls.setdefault(request.request_id.rsplit("-", 1)[0], Call(request.token_ids))
            assert request.token_ids == call.prompt + tuple(call.sampled), "a part continues prompt + partial"
            assert request.sampling.max_tokens == 60 - len(call.sampled)
            call.sampled += completion.token_ids
            call.logprobs += completion.logprobs
            call.versions += [run.version for run in completion.versions for _ in range(run.start, run.end)]
        return list(calls.values())


def assembled(stream: str) -> dict[str, Any]:
    """The message that a stream's deltas add up to."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line.startswith("data: {")]
    for delta in (json.loads(line)["choices"][0]["delta"] for line in lines):
        message["content"] += delta.get("content") or ""
        if "reasoning_content" in delta:
            message["reasoning_content"] = delta["reasoning_content"]
        for piece in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if piece["index"] == len(calls):
                calls.append({"id": piece["id"], "type": "function", "function": dict(piece["function"])})
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message


def carry(message: dict[str, Any], turn: Turn) -> list[dict[str, Any]]:
    """The answer as the harness puts it in its history, and what it says next."""
    kept = {key: value for key, value in message.items() if key != "malformed"}
    if turn.carried in ("no_reasoning", "redumped"):
        kept.pop("reasoning_content", None)
    if turn.carried == "parts" and kept.get("content"):
        kept["content"] = [{"type": "text", "text": kept["content"], "cache_control": {"type": "ephemeral"}}]
    if turn.carried == "edited":
        kept["content"] = "not what I said"
    if turn.carried == "redumped":
        kept["tool_calls"] = [redumped(call) for call in kept.get("tool_calls") or ()]
    if turn.carried == "dropped":
        return [{"role": "user", "content": turn.said}]
    calls = kept.get("tool_calls") or ()
    results = [{"role": "tool", "tool_call_id": call["id"], "content": turn.said} for call in calls]
    return [kept, *(results or [{"role": "user", "content": turn.said}])]


def redumped(call: dict[str, Any]) -> dict[str, Any]:
    try:
        text = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    except ValueError:
        return call
    return call | {"function": call["function"] | {"arguments": text}}


def check(calls: Sequence[Call], superseded: set[int], trajectories: Sequence[Trajectory]) -> None:
    owner = {logprob: (number, at) for number, call in enumerate(calls) for at, logprob in enumerate(call.logprobs)}
    trained: Counter[float] = Counter()
    for trajectory in trajectories:
        ids = trajectory.token_ids
        assert any(call.prompt + tuple(call.sampled) == ids for call in calls), "it ends where a call ended"
        for at, logprob in enumerate(trajectory.behavior_logprobs):
            if logprob is None:
                assert (trajectory.loss_mask[at], trajectory.policy_versions[at]) == (0, None)
                continue
            number, offset = owner[logprob]
            call = calls[number]
            assert at == len(call.prompt) + offset
            assert ids[:at] == call.prompt + tuple(call.sampled[:offset]), "the engine saw these very tokens"
            assert (ids[at], trajectory.policy_versions[at]) == (call.sampled[offset], call.versions[offset])
            trained[logprob] += trajectory.loss_mask[at]
    expected = {p for number, call in enumerate(calls) if number not in superseded for p in call.logprobs}
    assert trained == Counter(expected), "each sampled token trains exactly once, superseded ones never"
    assert all(trajectory.session_tokens == len(expected) for trajectory in trajectories)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def world(
    runner: asyncio.Runner, renderer: ConversationRenderer, say: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    engine = Chaos()
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("gateway.sessions.IN_MEMORY", 1)
    stack = serving_in_process(engine, renderer, tmp_path_factory.mktemp("store"))
    http = runner.run(anext(stack))
    yield World(http, engine, renderer, say)
    with pytest.raises(StopAsyncIteration):
        runner.run(anext(stack))
    monkeypatch.undo()


async def serving_in_process(engine: Chaos, renderer: ConversationRenderer, folder: Path) -> Any:
    database = await open_store(sqlite_url(folder / "gateway.db"))
    app = create_gateway_app(engines=[engine], renderer=renderer, database=database, config=GatewayConfig())
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as http:
            yield http
    await database.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(opening=hostile, plan=st.lists(turns, min_size=1, max_size=5))
def test_trajectories_are_what_the_engine_saw(
    runner: asyncio.Runner, world: World, opening: str, plan: list[Turn]
) -> None:
    check(*runner.run(world.play(opening, plan)))
