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


async def test_a_schema_reaches_an_engine_that_can(start_gateway: StartGateway, connect: Any, say: Any) -> None:
    schemas: list[str] = []

    class Constraining(ScriptedEngine):
        """Takes a schema as vLLM does."""

        async def generate(self, request: GenerateRequest) -> Completion:
            schemas.append(request.json_schema)
            return await super().generate(request.model_copy(update={"json_schema": ""}))

    engine = Constraining(lambda _: say('{"a": 1}'))
    async with start_gateway([engine]) as gateway, connect(await gateway.open()) as client:
        for wanted in (FORMAT, {"type": "json_object"}, {"type": "text"}):
            await client.chat.completions.create(model="policy", messages=[ASK], response_format=wanted)
    assert schemas == ['{"type":"object","properties":{"a":{"type":"integer"}}}', '{"type":"object"}', ""]


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
    async with start_gateway([engine]) as gateway:
        grant = await gateway.open()
        async with connect(grant, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(
                    model="policy", messages=[ASK], tools=[BASH], extra_body={field: value}
                )
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
