"""What a harness asks for besides messages: honoured, refused with the field's name, or noted as not applied."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from agentrl.core.http import Service
from agentrl.core.rendering import ConversationRenderer
from agentrl.core.types import Completion, GenerateRequest
from agentrl.testing.engine import ScriptedEngine
from gateway.wire.chat_messages import read_tools

from .conftest import BASH, TOKEN, Gateway, StartGateway

ASK = {"role": "user", "content": "list the files"}
READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
TOOLS = read_tools([BASH, READ])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


async def metrics_of(gateway: Gateway) -> str:
    service = Service(gateway.url, token=TOKEN)
    try:
        return (await service.request("GET", "/metrics")).text
    finally:
        await service.close()


@pytest.mark.parametrize(
    ("choice", "name"),
    [("required", ""), ({"type": "function", "function": {"name": "read"}}, "read")],
)
async def test_a_demanded_call_is_begun_for_the_model(
    start_gateway: StartGateway, connect: Any, say: Any, renderer: ConversationRenderer, choice: Any, name: str
) -> None:
    whole, last = say(calls=['{"path": "a.txt"}'], names=["read"]), say("done")
    opening = renderer.opening(TOOLS, name)
    assert whole[: len(opening)] == opening
    assert ("read" in renderer.tokenizer.decode(opening)) is bool(name)
    engine = ScriptedEngine([whole[len(opening) :], last])
    async with start_gateway([engine]) as gateway:
        grant = await gateway.open()
        async with connect(grant) as client:
            answer = await client.chat.completions.create(
                model="policy", messages=[ASK], tools=[BASH, READ], tool_choice=choice
            )
            (call,) = answer.choices[0].message.tool_calls
            assert (call.function.name, call.function.arguments) == ("read", '{"path": "a.txt"}')
            assert answer.choices[0].finish_reason == "tool_calls"
            result = {"role": "tool", "tool_call_id": call.id, "content": "hello"}
            history = [ASK, answer.choices[0].message.model_dump(), result]
            await client.chat.completions.create(model="policy", messages=history, tools=[BASH, READ])
        (trajectory,) = await gateway.admin.seal(grant.id)
    first, second = engine.requests
    assert first.token_ids[-len(opening) :] == opening
    assert second.token_ids[: len(first.token_ids)] == first.token_ids
    trained = [t for t, bit in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if bit]
    assert trained == [*whole[len(opening) :], *last], "what the gateway began is not the model's"


async def test_without_parallel_calls_the_answer_ends_after_the_first(
    start_gateway: StartGateway, connect: Any, say: Any
) -> None:
    both = say("I look.", calls=['{"command": "ls"}', '{"command": "pwd"}'])
    async with start_gateway([ScriptedEngine([both])]) as gateway:
        grant = await gateway.open()
        async with connect(grant) as client:
            answer = await client.chat.completions.create(
                model="policy", messages=[ASK], tools=[BASH], parallel_tool_calls=False
            )
        (trajectory,) = await gateway.admin.seal(grant.id)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.arguments == '{"command": "ls"}'
    assert answer.choices[0].finish_reason == "tool_calls"
    kept = sum(trajectory.loss_mask)
    assert kept < len(both)
    assert trajectory.token_ids[-kept:] == both[:kept]


async def test_a_seed_is_the_sessions_own(start_gateway: StartGateway, connect: Any, say: Any) -> None:
    engine = ScriptedEngine(lambda _: say("a"))
    async with start_gateway([engine]) as gateway:
        for _ in range(2):
            async with connect(await gateway.open()) as client:
                for seed in (7, 7, 8):
                    await client.chat.completions.create(model="policy", messages=[ASK], seed=seed)
    seeds = [request.seed for request in engine.requests]
    assert seeds[0] == seeds[1] != seeds[2]
    assert len({*seeds}) == 4, "attempts at a task must not all draw alike"


class Constraining(ScriptedEngine):
    """Takes a schema as vLLM does."""

    async def generate(self, request: GenerateRequest) -> Completion:
        found = await super().generate(request.model_copy(update={"json_schema": ""}))
        self.requests[-1] = request
        return found


async def test_a_schema_reaches_an_engine_that_can(start_gateway: StartGateway, connect: Any, say: Any) -> None:
    engine = Constraining(lambda _: say('{"a": 1}'))
    async with start_gateway([engine]) as gateway, connect(await gateway.open()) as client:
        for wanted in (FORMAT, {"type": "json_object"}, {"type": "text"}):
            await client.chat.completions.create(model="policy", messages=[ASK], response_format=wanted)
    schemas = [request.json_schema for request in engine.requests]
    assert schemas == ['{"type":"object","properties":{"a":{"type":"integer"}}}', '{"type":"object"}', ""]


@pytest.mark.parametrize("formats", [(None, FORMAT), (FORMAT, None), (FORMAT, FORMAT)])
async def test_a_draw_under_a_schema_is_recorded_but_not_trained(
    start_gateway: StartGateway, connect: Any, say: Any, formats: tuple[Any, Any]
) -> None:
    replies = [say("free") if wanted is None else say('{"a": 1}') for wanted in formats]
    async with start_gateway([Constraining(replies)]) as gateway:
        grant = await gateway.open()
        async with connect(grant) as client:
            history: list[Any] = [ASK]
            for wanted in formats:
                extra = {} if wanted is None else {"response_format": wanted}
                answer = await client.chat.completions.create(model="policy", messages=history, **extra)
                history = [*history, answer.choices[0].message.model_dump(), ASK]
        text = await metrics_of(gateway)
        sealed = await gateway.admin.seal(grant.id)
        assert await gateway.admin.trajectories(grant.id) == sealed
    (trajectory,) = sealed
    free = [token for wanted, reply in zip(formats, replies, strict=True) if wanted is None for token in reply]
    trained = [t for t, bit in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if bit]
    assert trained == free
    assert trajectory.session_tokens == len(free)
    sampled = sum(version is not None for version in trajectory.policy_versions)
    assert sampled == sum(map(len, replies)), "what the schema forced stays in the record"
    assert f"agentrl_gateway_constrained_tokens_total {float(sampled - len(free))}" in text


@pytest.mark.parametrize("choice", [None, "auto", "required"])
async def test_a_schema_that_would_keep_the_tools_from_being_called_is_refused(
    start_gateway: StartGateway, connect: Any, say: Any, choice: Any
) -> None:
    engine = Constraining(lambda _: say('{"a": 1}'))
    asked = {"model": "policy", "messages": [ASK], "tools": [BASH], "response_format": FORMAT}
    async with start_gateway([engine]) as gateway, connect(await gateway.open(), max_retries=0) as client:
        extra = {} if choice is None else {"tool_choice": choice}
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            await client.chat.completions.create(**asked, **extra)
        answer = await client.chat.completions.create(**asked, tool_choice="none")
    assert answer.choices[0].message.content == '{"a": 1}'


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", FORMAT),
        ("response_format", {"type": "grammar"}),
        ("tool_choice", {"type": "function", "function": {"name": "none such"}}),
        ("tool_choice", "sometimes"),
        ("tools", 5),
        ("n", 2),
        ("seed", "x"),
        ("top_logprobs", 5),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.5),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("guided_regex", "a+"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    start_gateway: StartGateway, connect: Any, say: Any, field: str, value: Any
) -> None:
    engine = ScriptedEngine(lambda _: say("a"))
    asked: dict[str, Any] = {field: value} if field == "response_format" else {"tools": [BASH], field: value}
    async with start_gateway([engine]) as gateway:
        grant = await gateway.open()
        async with connect(grant, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="policy", messages=[ASK], extra_body=asked)
        assert await gateway.admin.seal(grant.id) == ()
    error = caught.value.body
    assert isinstance(error, dict)
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    assert error["message"].startswith(f"{field}: ")


async def test_what_harnesses_send_by_default_is_accepted_and_noted(
    start_gateway: StartGateway, connect: Any, say: Any
) -> None:
    harmless = {"metadata": {"a": "b"}, "store": False, "user": "u", "logit_bias": {}, "n": 1, "presence_penalty": 0.0}
    unapplied = {"temperature": 0.2, "reasoning_effort": "low", "tools": [{"type": "web_search"}]}
    async with start_gateway([ScriptedEngine([say("a")])]) as gateway, connect(await gateway.open()) as client:
        await client.chat.completions.create(model="policy", messages=[ASK], extra_body=harmless | unapplied)
        text = await metrics_of(gateway)
    found = {line.split('"')[1] for line in text.splitlines() if "unapplied_fields_total{" in line}
    assert found == {"temperature", "reasoning_effort", "other"}


async def test_another_token_limit_in_each_call_leaves_one_trajectory(
    start_gateway: StartGateway, connect: Any, say: Any
) -> None:
    async with start_gateway([ScriptedEngine([say("a"), say("b")])]) as gateway:
        grant = await gateway.open()
        async with connect(grant) as client:
            history: list[Any] = [ASK]
            for limit in (300, 200):
                answer = await client.chat.completions.create(model="policy", messages=history, max_tokens=limit)
                history = [*history, answer.choices[0].message.model_dump(), ASK]
        (trajectory,) = await gateway.admin.seal(grant.id)
    assert sum(trajectory.loss_mask) == len(say("a")) + len(say("b"))
